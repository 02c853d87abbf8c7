"""The rollout's side of the front: sequences of HTTP requests beside leased trajectories in one generator.

They are no leases. The hub does not know of them, they never hold back new weights, they do not move to other rollouts, and their tokens
are counted apart. Their numbers in the generator are below 0; those of leases are not.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...comm.clock import Clock
from ...comm.errors import SettingError
from ...comm.messages import ServedPiece, ServedPrompt, ServedTokens, ServeSequences
from ..engine.sampling import SamplingParams
from ..engine.sequence import Completion, SequenceState

if TYPE_CHECKING:
    from ...comm.mailbox import Mailbox
    from ..generators.base import Generator

_log = logging.getLogger(__name__)

_FIRST = -(1 << 62)
SERVES = "serves"
"""The fact that a rollout announces once it takes sequences of the front."""
STREAM_S = 0.02
"""Least seconds between two messages about tokens of streams; the end of a sequence waits for nothing."""
LAZY_S = 0.25
"""Seconds between two messages about sequences whose clients wait for the whole answer."""
SHARE = 0.5
"""The part of the batch that served sequences may take while leased ones are unfinished; the others wait."""
REFUSED = "refused"
"""The end of a sequence that the generator does not take; its text says why."""
_MESSAGE_BYTES = 1 << 20
_TOKEN_BYTES = 36
"""About what a token, its log-prob and its version take in a message."""


def is_served(trajectory_id: int) -> bool:
    """Whether a trajectory of a rollout's generator belongs to an HTTP request."""
    return trajectory_id < 0


def params_of(prompt: ServedPrompt) -> SamplingParams:
    """The sampling of a prompt, as the front gave it: JSON has no tuples."""
    stop = prompt.params["stop"]
    return SamplingParams(**{**prompt.params, "stop": stop if isinstance(stop, str | int) else tuple(stop)})


@dataclass(slots=True)
class _Served:
    """A sequence of the front in the generator, or on its way there."""

    number: int
    state: SequenceState
    streams: bool
    num_sent: int
    """Tokens of the response that the front has."""
    num_kept: int
    """Of these, those that were drawn before it came here."""
    switches: list[tuple[int, int]] = field(default_factory=list)
    """(tokens of the response so far, version that draws the next ones), from its beginning here on."""

    def versions(self, start: int, stop: int) -> list[int]:
        """The version that drew each of these tokens."""
        found: list[int] = []
        ends = [at for at, _ in self.switches[1:]] + [stop]
        for (at, version), end in zip(self.switches, ends, strict=True):
            found += [version] * max(0, min(end, stop) - max(at, start))
        return found


class ServedSide:
    """The served sequences of one rollout; used by its loop between two steps of the generator."""

    def __init__(self, mailbox: "Mailbox", generator: "Generator", num_slots: int, clock: Clock) -> None:
        """num_slots: the sequences that the generator decodes together."""
        self._mailbox = mailbox
        self._generator = generator
        self._num_slots = num_slots
        self._clock = clock
        self._front = ""
        self._incarnation = 0
        """Of the front."""
        self._waiting: deque[_Served] = deque()
        self._served: dict[int, _Served] = {}
        """Those in the generator, by their number there."""
        self._dropped: dict[int, int] = {}
        """Kept tokens of those that were dropped when they had just ended: the next step returns them."""
        self._num_drawn = 0
        """Tokens of those that have ended or were dropped."""
        self._digest = ""
        """Of the generator's weights."""
        self._told_version = -1
        self._streamed_at = 0.0
        self._told_all_at = 0.0

    @property
    def num_served(self) -> int:
        """Sequences in the generator."""
        return len(self._served)

    @property
    def num_running(self) -> int:
        """Of these, those that have begun to decode, as far as is known here."""
        if not self._served:
            return 0
        begun = (part for part in self._generator.unfinished() if part.trajectory_id in self._served)
        return sum(part.num_response > self._served[part.trajectory_id].num_kept for part in begun)

    def check(self) -> None:
        """Raise `SettingError` if the generator cannot serve."""
        if not (self._generator.can_migrate and self._generator.can_stream):
            raise SettingError(
                "rollout.serve: this rollout.engine cannot begin single sequences and show their tokens"
                " (can_migrate and can_stream, docs/use/engines.md)"
            )

    def handle(self, sender: str, message: ServeSequences) -> None:
        """Take new sequences and drop others. A message of an earlier process of the front is ignored."""
        if message.front < self._incarnation:
            return
        if message.front > self._incarnation or message.is_first:
            self._front = sender
            self._incarnation = message.front
            self._drop(lambda served: True)
            self._told_version = -1
        if message.drop:
            gone = {*message.drop}
            self._drop(lambda served: served.number in gone)
        for prompt in message.begin:
            params = params_of(prompt)
            for sample in prompt.samples:
                num_kept = len(sample.token_ids)
                content = [*prompt.prompt_ids], [*sample.token_ids], [0.0] * num_kept
                state = SequenceState(_FIRST + sample.number, sample.key, params, *content)
                self._waiting.append(_Served(sample.number, state, sample.streams, num_kept, num_kept))
        self._tell([])

    def admit(self, *, has_leases: bool) -> None:
        """Begin those that have room beside the leased trajectories."""
        room = max(1, int(self._num_slots * SHARE)) if has_leases else self._num_slots
        refused: list[ServedPiece] = []
        while self._waiting and len(self._served) < room:
            served = self._waiting.popleft()
            try:
                self._generator.import_sequences([served.state])
            except SettingError as error:  # the client's mistake, as far as the front could not see it
                refused.append(ServedPiece(served.number, served.num_kept, [], [], [], REFUSED, str(error)))
                continue
            served.switches.append((served.num_kept, self._generator.weights.version))
            self._served[served.state.trajectory_id] = served
        if refused:
            self._tell(refused)

    def switched(self, version: int, digest: str = "") -> None:
        """The weights have changed: what is unfinished goes on under this version. digest: of its weights."""
        self._digest = digest
        for live in self._generator.unfinished():
            if (served := self._served.get(live.trajectory_id)) is not None:
                served.switches.append((live.num_response, version))
        self._tell([])

    def take(self, completions: Iterable[Completion]) -> list[Completion]:
        """Send the front what a step has given; returns the completions of leased trajectories."""
        pieces: list[ServedPiece] = []
        leased: list[Completion] = []
        for done in completions:
            if not is_served(done.trajectory_id):
                leased.append(done)
            elif (served := self._served.pop(done.trajectory_id, None)) is not None:
                self._num_drawn += len(done.token_ids) - served.num_kept
                pieces.append(_piece(served, done.token_ids, done.logprobs, done))
            else:
                self._num_drawn += len(done.token_ids) - self._dropped.pop(done.trajectory_id)
        self._tell(pieces + self._due_pieces())
        return leased

    def num_drawn(self) -> int:
        """Tokens drawn here for the front so far."""
        live = (part for part in self._generator.unfinished() if part.trajectory_id in self._served)
        return self._num_drawn + sum(part.num_response - self._served[part.trajectory_id].num_kept for part in live)

    # --------------------------------------------------------------------------------------------------------- internals

    def _due_pieces(self) -> list[ServedPiece]:
        """Tokens of unfinished sequences that the front does not have, if it is time to send them: those of streams or of all."""
        now = self._clock.now()
        is_due_for_all = now - self._told_all_at >= LAZY_S
        has_streams = any(served.streams for served in self._served.values())
        if now - self._streamed_at < STREAM_S or not self._served or not (is_due_for_all or has_streams):
            return []
        self._streamed_at = now
        if is_due_for_all:
            self._told_all_at = now
        return self._new_pieces(all_of_them=is_due_for_all)

    def _new_pieces(self, *, all_of_them: bool) -> list[ServedPiece]:
        """Tokens that the front does not have, of the streams or of all."""
        pieces: list[ServedPiece] = []
        for state in self._generator.responses():
            served = self._served.get(state.trajectory_id)
            if served is None or not (all_of_them or served.streams) or len(state.token_ids) == served.num_sent:
                continue
            pieces.append(_piece(served, state.token_ids, state.logprobs))
            served.num_sent = len(state.token_ids)
        return pieces

    def _tell(self, pieces: Sequence[ServedPiece]) -> None:
        """Send the pieces in messages of a bounded size, and a new version without any."""
        version = self._generator.weights.version
        if not self._front or not (pieces or version != self._told_version):
            return
        self._told_version = version
        batch: list[ServedPiece] = []
        num_bytes = 0
        for piece in pieces:
            size = _TOKEN_BYTES * len(piece.token_ids) + 2 * len(piece.text.encode())
            if batch and num_bytes + size > _MESSAGE_BYTES:
                self._mailbox.send(self._front, ServedTokens(self._incarnation, version, batch, self._digest))
                batch = []
                num_bytes = 0
            batch.append(piece)
            num_bytes += size
        self._mailbox.send(self._front, ServedTokens(self._incarnation, version, batch, self._digest))

    def _drop(self, is_gone: Callable[[_Served], bool]) -> None:
        self._waiting = deque(served for served in self._waiting if not is_gone(served))
        gone = {trajectory_id: served for trajectory_id, served in self._served.items() if is_gone(served)}
        if not gone:
            return
        live = [part.trajectory_id for part in self._generator.unfinished() if part.trajectory_id in gone]
        for state in self._generator.export_sequences(live):
            served = gone.pop(state.trajectory_id)
            del self._served[state.trajectory_id]
            self._num_drawn += len(state.token_ids) - served.num_kept
        for trajectory_id, served in gone.items():
            del self._served[trajectory_id]
            self._dropped[trajectory_id] = served.num_kept


def _piece(served: _Served, token_ids: list[int], logprobs: list[float], end: Completion | None = None) -> ServedPiece:
    start = served.num_sent
    new = token_ids[start:]
    versions = served.versions(start, len(token_ids))
    reason = (end.finish_reason, end.text) if end is not None else ("", "")
    return ServedPiece(served.number, start, new, logprobs[start:], versions, *reason)
