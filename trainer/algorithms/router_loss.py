"""The load-balancing loss of a mixture of experts: an auxiliary loss that keeps a router from choosing few experts only."""

from collections.abc import Sequence

import torch
from torch import Tensor


def load_balancing_loss(router_logits: Sequence[Tensor], top_k: int, weights: Tensor | None = None) -> Tensor:
    """E * sum over experts e of f_e * P_e, for the router logits [T, E] of every layer of experts.

    weights [T]: how many tokens each one stands for, by default one.

    f_e: the number of times that e is among a token's `top_k` experts, P_e: its mean probability; both are means over all
    tokens and layers, and only P_e has a gradient. A balanced router has the loss `top_k`. Source: Switch Transformers
    (arXiv 2101.03961, formulas 4 to 6), as transformers' `load_balancing_loss_func` has it for several layers and experts.
    """
    logits = torch.cat([layer.float() for layer in router_logits])
    probs = logits.softmax(-1)
    num_experts = probs.shape[-1]
    chosen = probs.topk(top_k).indices
    if weights is None:
        total, means = len(probs), probs.mean(0)
        counts = torch.bincount(chosen.flatten(), minlength=num_experts)
    else:
        weights = weights.repeat(len(router_logits))
        total = weights.sum()
        means = weights.to(probs.dtype) @ probs / total
        # Whole numbers in float64: their sum is the same in any order.
        counts = torch.bincount(chosen.flatten(), weights.double().repeat_interleave(top_k), minlength=num_experts)
    return num_experts * (counts.to(probs.dtype) / total * means).sum()
