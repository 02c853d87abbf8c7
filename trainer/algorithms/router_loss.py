"""The load-balancing loss of a mixture of experts: an auxiliary loss that keeps a router from choosing few experts only."""

from collections.abc import Sequence

import torch
from torch import Tensor


def load_balancing_loss(router_logits: Sequence[Tensor], top_k: int) -> Tensor:
    """E * sum over experts e of f_e * P_e, for the router logits [T, E] of every layer of experts.

    f_e: the number of times that e is among a token's `top_k` experts, P_e: its mean probability; both are means over all
    tokens and layers, and only P_e has a gradient. A balanced router has the loss `top_k`. Source: Switch Transformers
    (arXiv 2101.03961, formulas 4 to 6), as transformers' `load_balancing_loss_func` has it for several layers and experts.
    """
    logits = torch.cat([layer.float() for layer in router_logits])
    probs = logits.softmax(-1)
    num_experts = probs.shape[-1]
    counts = torch.bincount(probs.topk(top_k).indices.flatten(), minlength=num_experts)
    return num_experts * (counts / len(probs) * probs.mean(0)).sum()
