"""Trajectories as the trainer sees them, and their packing into micro-batches without padding."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..comm.messages import GroupRef, RowId

Fetch = Callable[[list[str], str], dict[str, np.ndarray]]
"""How the columns of a row are fetched: (units, key) -> columns."""


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
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True)
class Reference:
    """A trajectory that is still in its units: all that is needed to plan its training."""

    key: str
    units: list[str]
    version: int
    reward: float
    advantage: float
    num_tokens: int


def references_of(group: GroupRef, advantages: Sequence[float]) -> list[Reference]:
    """The trajectories of a group that was handed out."""
    return [
        Reference(
            key=RowId(group.group.epoch, group.group.prompt, sample).key(group.attempts[i]),
            units=group.units[i],
            version=group.versions[i],
            reward=group.rewards[i],
            advantage=advantages[i],
            num_tokens=group.num_tokens[i],
        )
        for i, sample in enumerate(group.samples)
    ]


def trajectory_of(reference: Reference, fetch: Fetch) -> Trajectory:
    """The trajectory with its columns."""
    columns = fetch(reference.units, reference.key)
    return Trajectory(
        prompt_ids=columns["prompt_ids"],
        response_ids=columns["response_ids"],
        rollout_logprobs=columns["rollout_logprobs"],
        loss_mask=columns["loss_mask"],
        version=reference.version,
        reward=reference.reward,
        advantage=reference.advantage,
    )


DUMMY = Trajectory(
    prompt_ids=np.zeros(1, np.int32),
    response_ids=np.zeros(1, np.int32),
    rollout_logprobs=np.zeros(1, np.float32),
    loss_mask=np.zeros(1, np.uint8),
    version=-1,
    reward=0.0,
)
"""A trajectory without weight, for a rank that has to run a round and has nothing to train."""


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


def rounds(references: Sequence[Reference], num_ranks: int, max_tokens: int) -> list[list[list[Reference]]]:
    """Who trains what: rounds of one micro-batch per rank, since sharded ranks must run equally many.

    Longest first to the rank with the fewest tokens so far; then each rank's share in parts of at most `max_tokens` (a longer
    trajectory stays whole), alike in length. A rank without a part in the last rounds has an empty one.
    """
    shares: list[list[Reference]] = [[] for _ in range(num_ranks)]
    sizes = [0] * num_ranks
    for reference in sorted(references, key=lambda r: -r.num_tokens):
        rank = sizes.index(min(sizes))
        shares[rank].append(reference)
        sizes[rank] += reference.num_tokens
    parts = [list(micro_batches(share, max_tokens)) for share in shares]
    return [[part[i] if i < len(part) else [] for part in parts] for i in range(max(map(len, parts)))]


def micro_batches(references: Sequence[Reference], max_tokens: int) -> Iterator[list[Reference]]:
    """Split into parts of at most `max_tokens` tokens each, keeping the order."""
    part: list[Reference] = []
    size = 0
    for reference in references:
        if part and size + reference.num_tokens > max_tokens:
            yield part
            part, size = [], 0
        part.append(reference)
        size += reference.num_tokens
    if part:
        yield part
