"""Trajectories as the trainer sees them, and their packing into micro-batches without padding."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)
class Trajectory:
    """One row of the experience queue with the columns that training needs.

    prompt_ids [P], response_ids [R] int32; rollout_logprobs [R] float32; loss_mask [R] uint8; `version` generated it.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    rollout_logprobs: np.ndarray
    loss_mask: np.ndarray
    version: int
    reward: float
    advantage: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(slots=True)
class PackedBatch:
    """Trajectories one after the other, T tokens in all, R of them drawn by the policy.

    token_ids [T]; cu_seqlens [n + 1]; predictors [R]: index of the token whose hidden state predicts each drawn token;
    targets, rollout_logprobs, advantages, mask [R]; is_fresh [R]: drawn by the very version in training.
    """

    token_ids: Tensor
    cu_seqlens: Tensor
    predictors: Tensor
    targets: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    is_fresh: Tensor


def pack(trajectories: list[Trajectory], version: int, device: torch.device) -> PackedBatch:
    """Lay trajectories end to end; `version` is the one in training."""
    lengths = [t.num_tokens for t in trajectories]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    # The hidden state at position i predicts token i + 1, so a response of R tokens is read from P - 1 on.
    predictors = [
        s + len(t.prompt_ids) - 1 + np.arange(len(t.response_ids)) for s, t in zip(starts, trajectories, strict=False)
    ]
    repeats = [len(t.response_ids) for t in trajectories]

    def joined(arrays: Iterable[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(list(arrays))).to(device=device, dtype=dtype)

    return PackedBatch(
        token_ids=joined((a for t in trajectories for a in (t.prompt_ids, t.response_ids)), torch.long),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32, device=device),
        predictors=joined(predictors, torch.long),
        targets=joined((t.response_ids for t in trajectories), torch.long),
        rollout_logprobs=joined((t.rollout_logprobs for t in trajectories), torch.float32),
        advantages=joined([np.repeat([t.advantage for t in trajectories], repeats)], torch.float32),
        mask=joined((t.loss_mask for t in trajectories), torch.float32),
        is_fresh=joined([np.repeat([t.version == version for t in trajectories], repeats)], torch.bool),
    )


def micro_batches(trajectories: list[Trajectory], max_tokens: int) -> Iterator[list[Trajectory]]:
    """Split into parts of at most `max_tokens` tokens each (a single longer trajectory stays whole), alike in length."""
    part: list[Trajectory] = []
    size = 0
    for trajectory in sorted(trajectories, key=lambda t: t.num_tokens):
        if part and size + trajectory.num_tokens > max_tokens:
            yield part
            part, size = [], 0
        part.append(trajectory)
        size += trajectory.num_tokens
    if part:
        yield part
