"""Trajectories with the columns that training needs, packed into micro-batches without padding."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..comm.errors import SettingError
from ..comm.messages.queue import RowRef

_log = logging.getLogger(__name__)


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
    advantage: float | np.ndarray = 0.0
    """One for the whole response, or [R], one for each token."""
    ref_logprobs: np.ndarray | None = None
    """[R] float32, by the initial policy."""
    proximal_logprobs: np.ndarray | None = None
    """[R] float32, by the policy at the start of the version in training, if it has been updated since."""
    versions: np.ndarray | None = None
    """[R] int32: the version of each token; None means `version` for all."""
    num_non_finite: int = 0
    """Tokens that lost their loss, since a column has no finite number for them."""

    @classmethod
    def of(
        cls, row: RowRef, columns: Mapping[str, np.ndarray], advantage: np.ndarray, mask: np.ndarray
    ) -> "Trajectory":
        """A row with its columns, advantages [R] and loss mask [R]; a column `advantages` replaces the advantages.

        A token without a finite number in each column has no loss, and the numbers of all tokens without loss are 0, so that
        none of them reaches a gradient. Raises SettingError for a column `advantages` of another length.
        """
        mask = mask != 0
        wanted = int(mask.sum())
        numbers = {name: columns[name] for name in ("rollout_logprobs", "ref_logprobs") if name in columns}
        numbers["advantages"] = _one_per_token(row, columns.get("advantages", advantage), len(mask))
        for name, column in numbers.items():
            broken = mask & ~np.isfinite(column.astype(np.float32))
            if broken.any():
                _log.warning(
                    "row %s: %d tokens without a finite number in %s have no loss", row.key, broken.sum(), name
                )
            mask &= ~broken
        numbers = {name: np.where(mask, column, 0) for name, column in numbers.items()}
        return cls(
            prompt_ids=columns["prompt_ids"],
            response_ids=columns["response_ids"],
            rollout_logprobs=numbers["rollout_logprobs"],
            loss_mask=mask.astype(np.uint8),
            version=row.version,
            advantage=numbers["advantages"],
            ref_logprobs=numbers.get("ref_logprobs"),
            versions=columns.get("versions"),
            num_non_finite=wanted - int(mask.sum()),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


def loss_mask(columns: Mapping[str, np.ndarray], *, mask_truncated: bool) -> np.ndarray:
    """[R] uint8: the row's own mask; zeros for a response that was cut at its longest length, if `mask_truncated`."""
    return columns["loss_mask"] * np.uint8(not (mask_truncated and columns["truncated"][0]))


def _one_per_token(row: RowRef, advantages: np.ndarray, num_tokens: int) -> np.ndarray:
    if advantages.size not in (1, num_tokens):
        raise SettingError(
            f"queue.tasks: column `advantages` of row {row.key} has {advantages.size} numbers for a response of {num_tokens} tokens"
        )
    return np.broadcast_to(advantages.reshape(-1), num_tokens)


_ZERO = np.zeros(1, np.int32)
PADDING_TRAJECTORY = Trajectory(_ZERO, _ZERO, rollout_logprobs=_ZERO, loss_mask=_ZERO, version=-1)
"""A trajectory without weight, for a rank that has an empty micro-batch and must take part in the collectives."""


@dataclass(slots=True)
class PackedBatch:
    """Trajectories one after the other, T tokens in all; R of them are response tokens, which the policy drew.

    token_ids [T]; cu_seqlens [n + 1]; predictors [R]: index of the token whose hidden state predicts each response token;
    targets, rollout_logprobs, advantages, mask [R]; staleness [R] int64: the version in training minus the one that drew the
    token; response_lengths [n] int64: response tokens of each trajectory, R in all. ref_logprobs, proximal_logprobs [R] are None
    if a trajectory lacks them. `progress`, from 0 to below 1: the share of the version's updates that the policy in training
    has had; with 0 it is itself the proximal policy.
    """

    token_ids: Tensor
    cu_seqlens: Tensor
    predictors: Tensor
    targets: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    staleness: Tensor
    response_lengths: Tensor
    progress: float
    ref_logprobs: Tensor | None
    proximal_logprobs: Tensor | None

    @property
    def is_fresh(self) -> Tensor:
        """[R] bool: drawn by the policy in training."""
        return (self.staleness == 0) & (self.progress == 0)


def pack(trajectories: list[Trajectory], version: int, device: torch.device, progress: float = 0.0) -> PackedBatch:
    """Pack trajectories end to end; `version` is the one in training, and `progress` its share of updates that are done."""
    lengths = [t.num_tokens for t in trajectories]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    # The hidden state at position i predicts token i + 1, so a response of R tokens is read from P - 1 on.
    predictors = [
        s + len(t.prompt_ids) - 1 + np.arange(len(t.response_ids)) for s, t in zip(starts, trajectories, strict=False)
    ]
    versions = [np.full(len(t.response_ids), t.version) if t.versions is None else t.versions for t in trajectories]

    def joined(arrays: Iterable[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(list(arrays))).to(device=device, dtype=dtype)

    def optional(arrays: list[np.ndarray | None]) -> Tensor | None:
        found = [array for array in arrays if array is not None]
        return joined(found, torch.float32) if len(found) == len(arrays) else None

    return PackedBatch(
        token_ids=joined((a for t in trajectories for a in (t.prompt_ids, t.response_ids)), torch.long),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32, device=device),
        predictors=joined(predictors, torch.long),
        targets=joined((t.response_ids for t in trajectories), torch.long),
        rollout_logprobs=joined((t.rollout_logprobs for t in trajectories), torch.float32),
        advantages=joined((np.broadcast_to(t.advantage, len(t.response_ids)) for t in trajectories), torch.float32),
        mask=joined((t.loss_mask for t in trajectories), torch.float32),
        staleness=version - joined(versions, torch.long),
        response_lengths=torch.tensor([len(t.response_ids) for t in trajectories], device=device),
        progress=progress,
        ref_logprobs=optional([t.ref_logprobs for t in trajectories]),
        proximal_logprobs=optional([t.proximal_logprobs for t in trajectories]),
    )
