"""Trajectories with the columns that training needs, packed into micro-batches without padding."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from ..comm.errors import SettingError
from ..comm.messages.queue import RowRef
from ..relay.queue.batch import Batch
from ..relay.queue.micro_batches import LEAST_RATIO, SHORTEST_PREFIX
from .policy.device import to_device
from .policy.prefix_tree import PrefixTree

_log = logging.getLogger(__name__)


NUMBERS = ("rollout_logprobs", "ref_logprobs", "advantages")
"""Columns with a number for each token of the response, where a row has them."""


@dataclass(slots=True)
class Trajectory:
    """One row of the experience queue with the columns that training needs.

    prompt_ids [P], response_ids [R] int32; loss_mask [R] uint8; all others [R] float32; `version` generated it.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    rollout_logprobs: np.ndarray
    loss_mask: np.ndarray
    version: int
    advantages: np.ndarray | None = None
    """None until the learner has them, or by a task of the user's."""
    ref_logprobs: np.ndarray | None = None
    """Log-probs of the initial policy."""
    proximal_logprobs: np.ndarray | None = None
    """Log-probs of the policy at the start of the version in training, if it has been updated since."""
    versions: np.ndarray | None = None
    """[R] int32: the version of each token; None means `version` for all."""
    values: np.ndarray | None = None
    """Values by the critic, before the updates of the step."""
    returns: np.ndarray | None = None
    """Targets of the critic."""
    branch_starts: np.ndarray | None = None
    """int32: the first token of each branch but the first, in prompt and response together: each is read without those before it."""

    @classmethod
    def of(cls, row: RowRef, columns: Mapping[str, np.ndarray]) -> "Trajectory":
        """A row with its columns."""
        names = {field.name for field in fields(cls)} & columns.keys() - {"version"}  # the row's own is meant
        return cls(version=row.version, **{name: columns[name] for name in names})

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    def sequences(self) -> list[np.ndarray]:
        """The token ids of prompt and response, of each branch apart."""
        token_ids = np.concatenate([self.prompt_ids, self.response_ids])
        return [token_ids] if self.branch_starts is None else np.split(token_ids, self.branch_starts)

    def of_branches(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Numbers of the response's tokens [R], of each branch apart; a later branch begins with its prompt, which has no loss."""
        return [numbers] if self.branch_starts is None else np.split(numbers, self.branch_starts - len(self.prompt_ids))


@dataclass(slots=True)
class TrajectoryBatch:
    """This rank's rows of a batch as trajectories, by key and in the order of training. The learner adds what it computes to them."""

    batch: Batch
    by_key: dict[str, Trajectory]

    @property
    def rows(self) -> list[Trajectory]:
        """All trajectories of this rank."""
        return list(self.by_key.values())

    def micro_batches(self) -> list[list[Trajectory]]:
        """The micro-batches, as many as on all other ranks, some of them empty."""
        return [[self.by_key[row.key] for row in part] for part in self.batch.micro_batches]


def check_tokens(batch: Batch, vocab_size: int) -> None:
    """Raise SettingError for a row without a prompt, or with a token id outside of the vocabulary: a generator's mistake.

    The first token of a response is predicted at the last one of its prompt, so without a prompt it would be the row before.
    """
    for row in batch.rows:
        columns = batch.columns[row.key]
        if not len(columns["prompt_ids"]):
            raise SettingError(f"rollout.engine: row {row.key} has an empty prompt")
        ids = np.concatenate([columns["prompt_ids"], columns["response_ids"]])
        if ids.min() < 0 or ids.max() >= vocab_size:
            wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
            raise SettingError(
                f"rollout.engine: row {row.key} has the token id {wrong}, outside of the policy's vocabulary of {vocab_size}"
            )


def trainable(batch: Batch, *, mask_truncated: bool) -> tuple[TrajectoryBatch, int]:
    """The trajectories of a batch, and how many tokens lost their loss.

    A token without a finite number in each of NUMBERS has no loss, nor has a response that was cut at its longest length, if
    `mask_truncated`. The numbers of all tokens without loss are 0, so that none of them reaches a gradient. Raises SettingError
    for a column `advantages` of another length.
    """
    found: dict[str, Trajectory] = {}
    num_lost = 0
    for row in batch.rows:
        columns = dict(batch.columns[row.key])
        mask = (columns["loss_mask"] != 0) & (not (mask_truncated and columns["truncated"][0]))
        num_wanted = int(mask.sum())
        numbers = {name: _one_per_token(row, name, columns[name], len(mask)) for name in NUMBERS if name in columns}
        for name, column in numbers.items():
            broken = mask & ~np.isfinite(column)
            if broken.any():
                _log.warning(
                    "row %s: %d tokens have no loss, since their %s is not finite", row.key, broken.sum(), name
                )
            mask &= ~broken
        columns |= {name: np.where(mask, column, np.float32(0)) for name, column in numbers.items()}
        columns["loss_mask"] = mask.astype(np.uint8)
        found[row.key] = Trajectory.of(row, columns)
        num_lost += num_wanted - int(mask.sum())
    return TrajectoryBatch(batch, found), num_lost


def _one_per_token(row: RowRef, name: str, column: np.ndarray, num_tokens: int) -> np.ndarray:
    if column.size not in (1, num_tokens):
        raise SettingError(
            f"queue.tasks: column `{name}` of row {row.key} has {column.size} numbers for a response of {num_tokens} tokens"
        )
    with np.errstate(over="ignore"):  # a number beyond float32 is not finite
        return np.broadcast_to(column.reshape(-1).astype(np.float32), num_tokens)


_ZERO = np.zeros(1, np.int32)
PADDING_TRAJECTORY = Trajectory(_ZERO, _ZERO, rollout_logprobs=_ZERO, loss_mask=_ZERO, version=-1, advantages=_ZERO)
"""A trajectory without weight, for a rank that has an empty micro-batch and must take part in the collectives."""


@dataclass(slots=True)
class PackedBatch:
    """Trajectories one after the other, T tokens in all; R of them are response tokens, which the policy drew.

    token_ids [T]; cu_seqlens: the ends of their sequences, with a 0 before them, in the host's memory; tree: their trie, if it is computed in place of them; predictors [R]: index of the token, of the
    trie if there is one, whose hidden state predicts each response token;
    targets, rollout_logprobs, advantages, mask [R]; staleness [R] int64: the version in training minus the one that drew the
    token; response_lengths [n] int64: response tokens of each trajectory, R in all; sequence_lengths: the same of each branch, which
    is a sequence of its own. The other [R] are None if a trajectory lacks them. is_updated: whether the policy in training has had an update of this version; else it is itself the
    proximal policy.
    """

    token_ids: Tensor
    cu_seqlens: Tensor
    tree: PrefixTree | None
    predictors: Tensor
    targets: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    staleness: Tensor
    response_lengths: Tensor
    sequence_lengths: Tensor
    is_updated: bool
    ref_logprobs: Tensor | None
    proximal_logprobs: Tensor | None
    values: Tensor | None
    returns: Tensor | None

    @property
    def is_fresh(self) -> Tensor:
        """[R] bool: drawn by the policy in training."""
        return (self.staleness == 0) & (not self.is_updated)

    @property
    def positions(self) -> Tensor:
        """[R] int64: the place of each token in its response, from 0."""
        num_tokens = len(self.mask)
        starts = self.response_lengths.cumsum(0) - self.response_lengths
        # With `output_size` a GPU need not tell the host how many tokens there are.
        firsts = starts.repeat_interleave(self.response_lengths, output_size=num_tokens)
        return torch.arange(num_tokens, device=firsts.device) - firsts


def pack(
    trajectories: list[Trajectory],
    version: int,
    device: torch.device,
    *,
    is_updated: bool = False,
    longest_in_tree: int = 0,
) -> PackedBatch:
    """Pack trajectories end to end; `version` is the one in training, `is_updated` that of the batch.

    Tokens that they share are computed once, unless that gains nothing or one of them is longer than `longest_in_tree` tokens.
    """
    sequences = [sequence for t in trajectories for sequence in t.sequences()]
    starts = np.cumsum([0, *(t.num_tokens for t in trajectories)])
    # The hidden state at position i predicts token i + 1, so a response of R tokens is read from P - 1 on. The first token of a later
    # branch has no loss, so that it does not matter what predicts it.
    predictors = [
        s + len(t.prompt_ids) - 1 + np.arange(len(t.response_ids)) for s, t in zip(starts, trajectories, strict=False)
    ]
    indices = np.concatenate(predictors)
    tree = _tree(sequences) if max(map(len, sequences)) <= longest_in_tree else None
    if tree is not None:
        indices = tree.row_nodes[indices]
    response_lengths = to_device(torch.tensor([len(t.response_ids) for t in trajectories]), device)
    sequence_lengths = response_lengths
    if any(t.branch_starts is not None for t in trajectories):
        parts = [len(part) for t in trajectories for part in t.of_branches(t.response_ids)]
        sequence_lengths = to_device(torch.tensor(parts), device)
    versions = [np.full(len(t.response_ids), t.version) if t.versions is None else t.versions for t in trajectories]

    def joined(arrays: Iterable[np.ndarray], dtype: torch.dtype) -> Tensor:
        return to_device(torch.from_numpy(np.concatenate(list(arrays))).to(dtype), device)

    def required(arrays: list[np.ndarray | None], dtype: torch.dtype) -> Tensor:
        found = [array for array in arrays if array is not None]
        assert len(found) == len(arrays), "a trajectory has no advantages"
        return joined(found, dtype)

    def optional(arrays: list[np.ndarray | None]) -> Tensor | None:
        found = [array for array in arrays if array is not None]
        return joined(found, torch.float32) if len(found) == len(arrays) else None

    return PackedBatch(
        token_ids=joined(sequences, torch.long),
        cu_seqlens=torch.tensor(np.cumsum([0, *map(len, sequences)]), dtype=torch.int32),
        tree=tree,
        predictors=to_device(torch.from_numpy(indices), device),
        targets=joined((t.response_ids for t in trajectories), torch.long),
        rollout_logprobs=joined((t.rollout_logprobs for t in trajectories), torch.float32),
        advantages=required([t.advantages for t in trajectories], torch.float32),
        mask=joined((t.loss_mask for t in trajectories), torch.float32),
        staleness=version - joined(versions, torch.long),
        response_lengths=response_lengths,
        sequence_lengths=sequence_lengths,
        is_updated=is_updated,
        ref_logprobs=optional([t.ref_logprobs for t in trajectories]),
        proximal_logprobs=optional([t.proximal_logprobs for t in trajectories]),
        values=optional([t.values for t in trajectories]),
        returns=optional([t.returns for t in trajectories]),
    )


def _tree(sequences: list[np.ndarray]) -> PrefixTree | None:
    """The trie of sequences; None where they have too little in common to gain time by it."""
    tree = PrefixTree.of(sequences, SHORTEST_PREFIX)
    return tree if tree.ratio >= LEAST_RATIO else None
