"""A packed batch from plain lists, for tests of the algorithms."""

import numpy as np
import torch

from headrace.trainer.batch import PackedBatch, Trajectory, pack


def packed(
    rollout_logprobs: list[list[float]],
    advantages: list[float],
    *,
    masks: list[list[float]] | None = None,
    ref_logprobs: list[list[float]] | None = None,
    dtype: torch.dtype = torch.float32,
) -> PackedBatch:
    """One list of log-probs for each response; the tokens do not matter."""
    trajectories = [
        Trajectory(
            prompt_ids=np.zeros(1, np.int32),
            response_ids=np.zeros(len(logprobs), np.int32),
            rollout_logprobs=np.array(logprobs, np.float32),
            loss_mask=np.array(masks[i] if masks else np.ones(len(logprobs))).astype(np.uint8),
            version=0,
            advantage=advantages[i],
            ref_logprobs=np.array(ref_logprobs[i], np.float32) if ref_logprobs else None,
        )
        for i, logprobs in enumerate(rollout_logprobs)
    ]
    batch = pack(trajectories, version=0, device=torch.device("cpu"))
    for name in ("rollout_logprobs", "advantages", "mask", "ref_logprobs"):
        if getattr(batch, name) is not None:
            setattr(batch, name, getattr(batch, name).to(dtype))
    return batch
