"""Streams the first tokens of unfinished trajectories into the storage units, and continues those of a dead rollout.

A trajectory's state is its tokens: random numbers are a hash of (stream, position), and keys and values are computed again. So
a continued trajectory has the tokens of an unbroken one. (Laminar, section 3: the partial response pool.)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from ..comm.messages import DrawnTokens, Lease, RowRef, RowsStreamed
from ..relay.queue.replicated_rows import ReplicatedRows, RowNotFound
from .engine.sampling import SamplingParams
from .engine.sequence import SequenceState
from .environments.base import Episode
from .leased_row import LeasedRow
from .leases import HeldLeases

if TYPE_CHECKING:
    from .generators.base import Generator


_NONE = np.frombuffer(b"{}", dtype=np.uint8)
_digests = msgspec.json.Decoder(dict[int, str])


class StreamedRow(NamedTuple):
    """The first tokens of one trajectory, which no unit has yet."""

    ref: RowRef
    columns: dict[str, np.ndarray]
    drawn: DrawnTokens = DrawnTokens()
    """Those of the rollout at this moment."""


def write_streamed(rows: list[StreamedRow], storage: ReplicatedRows) -> RowsStreamed | None:
    """Replace the stored first tokens; returns the report to the hub, or None if no unit accepts them now."""
    units = storage.try_put_rows({row.ref.key: row.columns for row in rows})
    return (
        None if units is None else RowsStreamed([replace(row.ref, storage_ids=units) for row in rows], rows[-1].drawn)
    )


@dataclass(slots=True)
class _Streamed:
    """The part of an unfinished response that the storage units have, as this attempt: its first tokens, and its turns."""

    held: LeasedRow
    attempt: int
    num_tokens: int = 0
    num_turns: int = 0


class PartialRows:
    """One rollout's part in the partial pool; used by its loop between two steps of the generator.

    stream_tokens: at most so many tokens of a response are generated again. A response is written when half of them are new, which
    is looked for four times as often, so that a quarter remains for the time of writing. 0 streams nothing.
    """

    def __init__(self, generator: "Generator", leases: HeldLeases, storage: ReplicatedRows, stream_tokens: int) -> None:
        self._generator = generator
        self._leases = leases
        self._storage = storage
        self._step_tokens = max(1, stream_tokens // 4)
        self._min_new = max(1, stream_tokens // 2)
        self._num_steps = 0
        self._streamed: dict[int, _Streamed] = {}

    def due(self, *, has_turns: bool = False) -> list[StreamedRow]:
        """After a step of the generator: the trajectories to write now; `has_turns`: some have begun their next turn."""
        self._num_steps += 1
        return self.all(self._min_new) if has_turns or self._num_steps % self._step_tokens == 0 else []

    def all(self, min_new: int = 1) -> list[StreamedRow]:
        """Every unfinished trajectory with `min_new` tokens, or an answered turn, that are not written yet."""
        known = self._streamed
        self._streamed = {}
        rows: list[StreamedRow] = []
        for part in self._generator.responses():
            held = self._leases.held.get(part.trajectory_id)
            if held is None:
                continue
            streamed = known.get(part.trajectory_id)
            if streamed is None or streamed.held is not held or streamed.attempt != held.attempt:
                streamed = _Streamed(held, held.attempt)
            self._streamed[part.trajectory_id] = streamed
            num_turns = len(held.episode.observations) if held.episode else 0
            is_due = len(part.token_ids) - streamed.num_tokens >= min_new or num_turns > streamed.num_turns
            if is_due and not held.claim_id:
                streamed.num_tokens = len(part.token_ids)
                streamed.num_turns = num_turns
                rows.append(_streamed_row(held, part))
        return rows

    def begun(self, lease: Lease, fresh: Iterable[LeasedRow], params: SamplingParams) -> list[SequenceState]:
        """The states of those leased rows that a dead rollout has begun.

        One that cannot be read starts at its prompt. So does one that another version began or continued than the hub believes,
        unless versions may mix: a writer that counted as dead may have replaced the bytes since.
        """
        may_mix = self._leases.mixes_versions and not lease.group.is_evaluation
        refs = {ref.row: ref for ref in lease.partials}
        states: list[SequenceState] = []
        for held in fresh:
            if (ref := refs.get(held.row_id)) is None:
                continue
            try:
                columns = self._storage.get_row(ref.key, ref.storage_ids)
            except RowNotFound:
                continue  # it was logged, and costs these tokens
            prompt_ids, token_ids, logprobs, versions, stream = (
                columns[name].tolist()
                for name in ("prompt_ids", "response_ids", "rollout_logprobs", "versions", "stream")
            )
            is_other = versions and (versions[-1] != held.version or min(versions) < ref.version)
            if not may_mix and is_other:
                continue
            digests = columns.get("weight_digests", _NONE)  # a saved queue of an earlier version has none
            held.keep(len(prompt_ids), versions, _digests.decode(digests.tobytes()))
            place = 0, False
            if "episode" in columns:
                held.episode = msgspec.json.decode(columns["episode"].tobytes(), type=Episode)
                place = held.episode.turn_start, held.episode.is_waiting
            tokens = prompt_ids, token_ids, logprobs
            states.append(SequenceState(held.row_id.number, stream[0], params, *tokens, None, *place))
        return states


def _streamed_row(held: LeasedRow, part: SequenceState) -> StreamedRow:
    """Versions and log-probs have one entry per token of the response; `episode` has the turns of an environment as JSON."""
    versions = held.first_versions(len(part.prompt_ids), len(part.token_ids))
    columns = {
        "prompt_ids": np.array(part.prompt_ids, dtype=np.int32),
        "response_ids": np.array(part.token_ids, dtype=np.int32),
        "rollout_logprobs": np.array(part.logprobs, dtype=np.float32),
        "versions": versions,
        "weight_digests": held.digests_of(versions),
        "stream": np.array([part.key], dtype=np.int64),
    }
    if held.episode is not None:
        columns["episode"] = np.frombuffer(msgspec.json.encode(held.episode), dtype=np.uint8)
    tokens = int(versions.min()), len(versions)
    num_drawn = len(versions) - (held.episode.num_inserted() if held.episode is not None else 0)
    ref = RowRef(held.row_id, held.attempt, [], *tokens, is_partial=True, newest=int(versions[-1]), num_drawn=num_drawn)
    return StreamedRow(ref, columns)
