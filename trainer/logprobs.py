"""Log-probabilities of trajectories: of a packed batch, for training, and of each row, for the task `reference`."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..comm.recipe import Recipe
from .batch import PADDING_TRAJECTORY, PackedBatch, Trajectory, pack
from .policy.model import Policy

if TYPE_CHECKING:
    from ..relay.queue.batch import Batch

NEEDED = ("prompt_ids", "response_ids")
"""The columns that `response_logprobs` reads."""


def packed_logprobs(policy: Policy, batch: PackedBatch, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each response token, [R] each, at the temperature of sampling."""
    half = torch.bfloat16 if recipe.model.dtype == "bfloat16" else None
    # Autocast's cache would keep a half-precision copy of all weights until the end of the forward pass.
    device = batch.token_ids.device.type
    with torch.autocast(device, half or torch.bfloat16, enabled=half is not None, cache_enabled=False):
        hidden = policy.forward_packed(batch.token_ids, batch.cu_seqlens)
    return policy.token_logprobs(hidden[batch.predictors], batch.targets, recipe.sampling.temperature or 1.0, half)


def response_logprobs(policy: Policy, batch: "Batch", device: torch.device, recipe: Recipe) -> list[np.ndarray]:
    """[R] float32 for each of this rank's rows, in the order of `batch.rows`, at the temperature of sampling.

    A collective of the ranks that share a sharded policy.
    """
    found: list[np.ndarray] = []
    for part in batch.micro_batches:
        tokens = [[batch.columns[row.key][name] for name in NEEDED] for row in part]
        lengths = [len(response) for _, response in tokens]
        trajectories = [
            Trajectory(prompt, response, np.zeros(n, np.float32), np.ones(n, np.uint8), version=-1)
            for (prompt, response), n in zip(tokens, lengths, strict=True)
        ]
        with torch.no_grad():
            logprobs, _ = packed_logprobs(policy, pack(trajectories or [PADDING_TRAJECTORY], -1, device), recipe)
        found += np.split(logprobs.float().cpu().numpy(), np.cumsum(lengths)[:-1]) if part else []
    return found
