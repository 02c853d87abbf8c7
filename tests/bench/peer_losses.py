"""Losses of peers to compare the default with, as functions of a user's (`algorithm.loss=FILE.py:FUNCTION`, `algorithm.proximal=rollout`).

The ratio r of a token is p / b, of the policy in training to the one that generated the token.
"""

import torch
from torch import Tensor

from headrace.trainer.algorithms.losses import LossInputs, log_ratio

DPPO_BOUND = 0.1
"""Largest difference of a token's probability, in the direction of its advantage (prime-rl's value)."""
DPPO_KL = 1e-3
"""Weight of the squared log-ratio (prime-rl's value)."""


def dppo(x: LossInputs) -> tuple[Tensor, Tensor]:
    """DPPO with binary total variation (arXiv 2602.04879), and prime-rl's squared log-ratio: -m r A + DPPO_KL log(r)^2.

    m is 0 where the token's probability has moved by more than the bound in the direction of its advantage.
    """
    log_r = log_ratio(x.logprobs, x.behaviour_logprobs)
    moved = x.logprobs.detach().exp() - x.behaviour_logprobs.exp()
    has_left = torch.where(x.advantages > 0, moved > DPPO_BOUND, moved < -DPPO_BOUND)
    return torch.where(has_left, 0.0, -log_r.exp() * x.advantages) + DPPO_KL * log_r.square(), has_left
