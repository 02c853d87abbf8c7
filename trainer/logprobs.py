"""Log-probabilities of trajectories: of a packed batch, for training, and of each row, for the task `reference`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.recipe import Recipe
from .batch import PADDING_TRAJECTORY, PackedBatch, Trajectory, check_tokens, pack

if TYPE_CHECKING:
    from ..relay.queue.batch import Batch
    from .policy.model import Policy

NEEDED = ("prompt_ids", "response_ids")
"""The columns that `response_logprobs` reads, besides `branch_starts` of rows that have them."""


def packed_hidden(policy: "Policy", batch: PackedBatch, dtype: str) -> Tensor:
    """Hidden states [R, hidden] that predict the response tokens; `dtype` is `model.dtype`."""
    # Autocast's cache would keep a half-precision copy of all weights until the end of the forward pass.
    device = batch.token_ids.device
    is_half = dtype == "bfloat16" and policy.exact is None
    with torch.autocast(device.type, torch.bfloat16, enabled=is_half, cache_enabled=False):
        if batch.tree is not None:
            # A token of the trie may predict several; an embedding's gradient is added up in one order.
            return F.embedding(batch.predictors, policy.forward_tree(batch.tree, device))
        hidden = policy.forward_packed(batch.token_ids, batch.cu_seqlens)
    return hidden[batch.predictors]


def packed_logprobs(policy: "Policy", batch: PackedBatch, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each response token, [R] each, at the temperature of sampling."""
    hidden = packed_hidden(policy, batch, recipe.model.compute_type)
    half = torch.bfloat16 if recipe.model.compute_type == "bfloat16" else None
    return policy.token_logprobs(hidden, batch.targets, recipe.sampling.temperature or 1.0, half)


def response_logprobs(policy: "Policy", batch: "Batch", device: torch.device, recipe: Recipe) -> list[np.ndarray]:
    """[R] float32 for each of this rank's rows, in the order of `batch.rows`, at the temperature of sampling.

    A collective of the ranks that share a sharded policy. Raises SettingError for rows that no policy can have drawn.
    """
    check_tokens(batch, policy.vocab_size)
    return by_row(policy, batch, device, lambda packed: packed_logprobs(policy, packed, recipe)[0])


def longest_in_tree(policy: "Policy", recipe: Recipe) -> int:
    """Tokens of the longest row of a new batch that may share its first ones with others; 0 computes each row alone.

    Exact mode does so everywhere: also in the critic and the reference, whose own modules are not exact.
    """
    return policy.longest_in_tree if recipe.trainer.prefix_tree and not recipe.generator.exact else 0


def by_row(
    policy: "Policy", batch: "Batch", device: torch.device, compute: Callable[[PackedBatch], Tensor]
) -> list[np.ndarray]:
    """Numbers [R] float32 for the response tokens of each of this rank's rows, as `compute` returns them for a packed batch; without gradient."""
    longest = policy.longest_in_tree if batch.has_trees else 0
    found: list[np.ndarray] = []
    for part in batch.micro_batches:
        rows = [batch.columns[row.key] for row in part]
        lengths = [len(columns["response_ids"]) for columns in rows]
        zeros = [np.zeros(length, np.float32) for length in lengths]
        trajectories = [
            Trajectory(
                columns["prompt_ids"], columns["response_ids"], zero, zero, version=-1, advantages=zero,
                branch_starts=columns.get("branch_starts"),
            )
            for columns, zero in zip(rows, zeros, strict=True)
        ]  # fmt: skip
        with torch.no_grad():
            packed = pack(trajectories or [PADDING_TRAJECTORY], -1, device, longest_in_tree=longest)
            numbers = compute(packed)
        found += np.split(numbers.float().cpu().numpy(), np.cumsum(lengths)[:-1]) if part else []
    return found
