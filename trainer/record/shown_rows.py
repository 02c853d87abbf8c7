"""The rows of a step that are recorded as samples: whole groups, with what the learner computed for their tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from torch import Tensor

from ...comm.messages import RowId, TrainBatch
from ...comm.messages.queue import RowRef
from ..batch import Trajectory, TrajectoryBatch

if TYPE_CHECKING:
    from ...relay.queue.batch import Batch
    from ..actor_group import ActorGroup

MOST_TOKENS = 1 << 15
"""Response tokens of a step, of all ranks, with log-probs of their own. Samples beyond have their text alone."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A trained row of P prompt tokens and R response tokens. Lists have one entry for each token of the response.

    `place` is that of its group in the step. What only the learner knows is None where it does not say.
    """

    place: int
    row: RowRef
    prompt_ids: list[int]
    response_ids: list[int]
    from_policy: list[int]
    """1 for a token that the policy drew, 0 for one that an environment inserted."""
    versions: list[int]
    logprobs: list[float] | None
    """By the generator; None, as the other lists of numbers, for a sample beyond `MOST_TOKENS`."""
    is_cut: bool
    info: bytes
    """JSON: what the reward functions noted (`LeasedRow.info`)."""
    num_trained: int | None = None
    """The tokens with a loss."""
    advantage: float | None = None
    """The mean over the tokens with a loss, over all if none has one."""
    advantages: list[float] | None = None
    trainer_logprobs: list[float] | None = None
    """By the policy in training, when it was first trained on the row in this step."""


@dataclass(slots=True)
class _Row:
    """A row of this rank until the step is complete. The arrays are those of training, not copies."""

    place: int
    row: RowRef
    columns: dict[str, np.ndarray]
    trajectory: Trajectory | None = None
    logprobs: Tensor | None = None

    def sample(self, *, has_tokens: bool) -> Sample:
        """The row with its numbers in lists. has_tokens: also those of each token."""
        columns = self.columns
        ids = columns["response_ids"]
        versions = columns.get("versions", np.full(len(ids), self.row.version))
        info = columns.get("reward_info")
        mask = None if self.trajectory is None else self.trajectory.loss_mask
        advantages = None if self.trajectory is None else self.trajectory.advantages
        return Sample(
            place=self.place,
            row=self.row,
            prompt_ids=columns["prompt_ids"].tolist(),
            response_ids=ids.tolist(),
            from_policy=columns["loss_mask"].tolist(),
            versions=versions.tolist(),
            logprobs=columns["rollout_logprobs"].tolist() if has_tokens else None,
            is_cut=bool(columns["truncated"][0]),
            info=b"{}" if info is None else info.tobytes(),
            num_trained=None if mask is None else int(mask.sum()),
            advantage=_advantage(mask, advantages),
            advantages=advantages.tolist() if has_tokens and advantages is not None else None,
            trainer_logprobs=self.logprobs.float().cpu().tolist() if has_tokens and self.logprobs is not None else None,
        )


def _advantage(mask: np.ndarray | None, advantages: np.ndarray | None) -> float | None:
    if mask is None or advantages is None or not len(advantages):
        return None
    values = advantages[mask.astype(bool)]
    return float((values if len(values) else advantages).mean(dtype=np.float64))


class ShownRows:
    """Collects the rows of `num_groups` groups of a step. Which groups these are is drawn by the step's number alone.

    So all ranks choose alike, as does a trainer that trains the step again. The first groups of a step would be the wrong choice: these
    are the ones with short responses.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._places: dict[str, tuple[int, RowId]] = {}
        """Where the chosen rows of all ranks are in the step; the same on all ranks."""
        self._rows: dict[str, _Row] = {}
        """Those of this rank."""
        self._of_trajectory: dict[int, _Row] = {}
        """By the object's identity: `_rows` keep the objects alive."""
        self._everywhere: list[Sample] | None = None

    def add(self, batch: "Batch") -> None:
        """Take this rank's rows of the chosen groups from a batch of the step."""
        taken = batch.row_batch
        if not self._num_groups or not isinstance(taken, TrainBatch):
            return
        chosen = random.Random(taken.step).sample(range(taken.total), min(self._num_groups, taken.total))
        places = {group.group: place for place, group in enumerate(taken.groups, taken.first) if place in chosen}
        self._places |= {row.key: (places[row.row.group], row.row) for row in taken.rows() if row.row.group in places}
        for row in batch.rows:
            if row.key in self._places:
                self._rows[row.key] = _Row(self._places[row.key][0], row, batch.columns[row.key])

    def add_trajectories(self, batch: TrajectoryBatch) -> None:
        """Note the trajectories of a batch that was added, whose advantages may come later."""
        for key, trajectory in batch.by_key.items():
            if (row := self._rows.get(key)) is not None:
                row.trajectory = trajectory
                self._of_trajectory[id(trajectory)] = row

    def add_logprobs(self, trajectories: list[Trajectory], logprobs: Tensor) -> None:
        """Note what the policy in training gives to a micro-batch's response tokens, [R] one row after the other. The first pass counts."""
        if not self._of_trajectory.keys() & set(map(id, trajectories)):
            return
        parts = logprobs.split([len(trajectory.response_ids) for trajectory in trajectories])
        for trajectory, part in zip(trajectories, parts, strict=True):
            row = self._of_trajectory.get(id(trajectory))
            if row is not None and row.logprobs is None:
                row.logprobs = part

    def gather(self, group: "ActorGroup") -> None:
        """Collect the rows of all ranks on rank 0, which records them; a collective."""
        if not self._places or group.size == 1:
            return
        samples = self._samples(group.all_reduce_sum(self._lengths()))
        parts = group.gather(msgspec.msgpack.encode(samples) if samples else b"")
        self._everywhere = [
            sample for part in parts if part for sample in msgspec.msgpack.decode(part, type=list[Sample])
        ]

    def found(self) -> list[Sample]:
        """The samples of all ranks after `gather`, group by group."""
        samples = self._everywhere
        if samples is None:
            samples = self._samples(self._lengths())
        return sorted(samples, key=lambda sample: (sample.place, sample.row.row))

    def _lengths(self) -> list[float]:
        """Response tokens of each chosen row, 0 for those of other ranks."""
        rows = map(self._rows.get, self._places)
        return [0.0 if row is None else float(len(row.columns["response_ids"])) for row in rows]

    def _samples(self, lengths: Sequence[float]) -> list[Sample]:
        """This rank's rows. lengths: response tokens of the chosen rows of all ranks, which share `MOST_TOKENS`."""
        left = MOST_TOKENS
        samples: list[Sample] = []
        for (key, _), length in sorted(zip(self._places.items(), lengths, strict=True), key=lambda entry: entry[0][1]):
            left -= length
            if (row := self._rows.get(key)) is not None:
                samples.append(row.sample(has_tokens=left >= 0))
        return samples
