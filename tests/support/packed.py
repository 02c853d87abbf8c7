"""A packed batch from plain lists, for tests of the algorithms."""

from collections.abc import Sequence

import numpy as np
import torch

from headrace.trainer.batch import PackedBatch, Trajectory, pack


def packed(
    rollout_logprobs: Sequence[Sequence[float]],
    advantages: Sequence[float],
    *,
    masks: Sequence[Sequence[float]] | None = None,
    ref_logprobs: Sequence[Sequence[float]] | None = None,
    dtype: torch.dtype = torch.float32,
) -> PackedBatch:
    """One list of log-probs for each response, and its advantage; the tokens do not matter."""
    trajectories = [
        Trajectory(
            prompt_ids=np.zeros(1, np.int32),
            response_ids=np.zeros(len(logprobs), np.int32),
            rollout_logprobs=np.zeros(len(logprobs), np.float32),
            loss_mask=np.array(masks[i] if masks else np.ones(len(logprobs))).astype(np.uint8),
            version=0,
            advantages=np.zeros(len(logprobs), np.float32),
        )
        for i, logprobs in enumerate(rollout_logprobs)
    ]
    batch = pack(trajectories, version=0, device=torch.device("cpu"))
    batch.mask = batch.mask.to(dtype)
    batch.rollout_logprobs = joined(rollout_logprobs, dtype)
    batch.advantages = torch.tensor(advantages, dtype=dtype).repeat_interleave(batch.response_lengths)
    batch.ref_logprobs = joined(ref_logprobs, dtype) if ref_logprobs else None
    return batch


def joined(columns: Sequence[Sequence[float]], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The tokens of all responses, one after the other."""
    return torch.tensor([value for column in columns for value in column], dtype=dtype)


def split(values: Sequence[float], lengths: Sequence[int]) -> list[list[float]]:
    """The tokens of each response."""
    ends = np.cumsum(lengths)
    return [list(values[end - n : end]) for end, n in zip(ends, lengths, strict=True)]
