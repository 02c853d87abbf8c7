"""Between the front of a run and its rollouts: each sequence goes to one of them, by messages, and its tokens come back.

The desk keeps the tokens of every open sequence. Random numbers are a hash of (stream, position), so a sequence whose rollout dies
goes on at another one with the same tokens. The thread of the event loop submits and releases; another one calls `turn`.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...comm.fleet import Fleet
from ...comm.mailbox import Envelope, Mailbox
from ...comm.messages import Message, ServedPiece, ServedPrompt, ServedSample, ServedTokens, ServeSequences, Stop
from ...relay.receipts import note_digest
from ..engine.sampling import SamplingParams
from ..engine.sequence import Completion
from ..engine.streams import stream_key
from .desk import Piece, Ticket, check_room, once_quiet, spread
from .fields import RequestRefused
from .prefix_homes import PrefixHomes
from .served_side import REFUSED, SERVES

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds between two looks at the rollouts."""
_TOGETHER = 8
"""Most responses to one prompt that are placed together."""
_BUSIER = 4
"""A conversation stays with its rollout unless that one has twice as many sequences as another, and so many more."""
_KNOWN_VERSIONS = 64
"""Versions of each rollout whose digests are kept. Those of a sequence's tokens are noted when the tokens come."""
_MESSAGE_TOKENS = 1 << 17
"""Most tokens of a message with several prompts."""


@dataclass(slots=True, eq=False)
class _Open:
    """A sequence of a request that has not ended."""

    ticket: Ticket
    loop: asyncio.AbstractEventLoop
    sample: int
    prompt: list[int]
    params: SamplingParams
    key: int
    number: int = 0
    """At its rollout; a new one at each."""
    rollout: str = ""
    """Empty while there is none."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    """Of the weights of these versions; "" for one that is not known, or that two rollouts had with other weights."""


class RunDesk:
    """Requests to the rollouts of a run."""

    def __init__(self, fleet: Fleet, mailbox: Mailbox, most_samples: int) -> None:
        """mailbox: the front's, which `turn` reads. most_samples: responses for each rollout that may wait or run."""
        self.num_samples = 0
        """Responses that were asked for and have not ended."""
        self.version = 0
        """The newest version that a rollout has."""
        self.others: Callable[[Message], None] = lambda message: None
        """Gets the messages that are not about requests."""
        self.ended = ""
        """How the run has ended; empty while it goes on."""
        self._fleet = fleet
        self._mailbox = mailbox
        self._most_samples = most_samples
        self._lock = threading.Lock()
        self._rollouts: dict[str, int] = {}
        """The incarnation of each living rollout."""
        self._versions: dict[str, int] = {}
        """The version that each rollout had when it last told something."""
        self._digests: dict[str, dict[int, str]] = {}
        """Of the versions that each rollout has had lately."""
        self._tickets: dict[Ticket, list[_Open]] = {}
        self._placed: dict[int, _Open] = {}
        self._waiting: list[_Open] = []
        self._is_gathering = False
        """Whether requests that arrive together are being gathered, to go to the rollouts together."""
        self._numbers = itertools.count(fleet.incarnation << 32)
        self._homes = PrefixHomes()
        self._looked_at = 0.0

    @property
    def oldest_version(self) -> int:
        """The oldest version of a living rollout, as far as they have told; -1 without one."""
        return min((self._versions[name] for name in self._rollouts if name in self._versions), default=-1)

    # ---------------------------------------------------------------------------------------- the thread of the event loop

    def submit(self, ticket: Ticket) -> None:
        """Place the sequences of a request. Raises `RequestRefused`, with the status 429 where too many wait."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self.ended:
                raise self._over()
            check_room(ticket, self.num_samples, self._most_samples * max(1, len(self._rollouts)))
            self.num_samples += ticket.num_samples
            fresh: list[_Open] = []
            for prompt, params in zip(ticket.prompts, ticket.params, strict=True):
                assert params.seed is not None
                one = replace(params, n=1)
                for stream in range(params.n):
                    fresh.append(_Open(ticket, loop, len(fresh), prompt, one, stream_key(params.seed, stream)))
            self._tickets[ticket] = [*fresh]
            self._waiting += fresh
        if not self._is_gathering:
            self._is_gathering = True
            once_quiet(loop, lambda: len(self._waiting), self._place_gathered)

    def _place_gathered(self) -> None:
        self._is_gathering = False
        with self._lock:
            self._place()

    def release(self, ticket: Ticket) -> None:
        """Forget a request that was submitted: it is answered, or its client has left. What is unfinished is dropped."""
        with self._lock:
            self.num_samples -= ticket.num_samples
            left = self._tickets.pop(ticket, [])
            by_rollout: dict[str, list[int]] = {}
            for each in left:
                if self._placed.pop(each.number, None) is not None:
                    by_rollout.setdefault(each.rollout, []).append(each.number)
            if left:
                self._waiting = [each for each in self._waiting if each.ticket is not ticket]
            for rollout, numbers in by_rollout.items():
                self._send(rollout, ServeSequences(self._fleet.incarnation, drop=numbers))

    def late(self, ticket: Ticket, timeout_s: float) -> RequestRefused:
        """The error of a request that has no answer after so many seconds."""
        with self._lock:
            has_none = any(not each.rollout for each in self._tickets.get(ticket, ()))
        if has_none:
            problem = f"no rollout of the run could take the request within {timeout_s:g} s: none is alive"
            return RequestRefused(problem, status=503, code="no_rollout")
        return RequestRefused(f"the request took longer than {timeout_s:g} s", status=504, code="timeout")

    # ------------------------------------------------------------------------------------------------- the other thread

    def turn(self, wait_s: float) -> None:
        """Wait for a message so long, handle those that are there, and look at the rollouts."""
        envelope = self._mailbox.receive(wait_s)
        while envelope is not None:
            self._handle(envelope)
            envelope = self._mailbox.receive(0.0)
        if (now := time.monotonic()) - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._look()

    def end(self, how: str) -> None:
        """The run has ended: open requests get an error, and so does every new one."""
        with self._lock:
            self.ended = how
            tickets = {ticket: left[0].loop for ticket, left in self._tickets.items() if left}
            self._placed.clear()
            self._waiting.clear()
            for left in self._tickets.values():
                left.clear()
            error = self._over()
        for ticket, loop in tickets.items():
            _call(loop, ticket.fail, error)

    def _handle(self, envelope: Envelope) -> None:
        match envelope.message:
            case ServedTokens(front=front) as message if front == self._fleet.incarnation:
                with self._lock:
                    self.version = max(self.version, message.version)
                    self._versions[envelope.sender] = message.version
                    self._note_digest(envelope.sender, message)
                    pieces = [self._take(envelope.sender, piece) for piece in message.pieces]
                by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Piece]]] = {}
                for open_one, piece in filter(None, pieces):
                    by_loop.setdefault(open_one.loop, []).append((open_one.ticket, piece))
                for loop, found in by_loop.items():
                    _call(loop, spread, found)
            case Stop(reason=reason):
                self.end(reason)
            case message:
                self.others(message)

    def _take(self, rollout: str, piece: ServedPiece) -> tuple[_Open, Piece] | None:
        """Note new tokens; returns what the request gets of them. Those of a sequence that has left the rollout are ignored: at each
        rollout it has another number."""
        each = self._placed.get(piece.number)
        if each is None:
            return None
        each.token_ids += piece.token_ids
        each.logprobs += piece.logprobs
        each.versions += piece.versions
        known = self._digests.get(rollout, {})
        for version in {*piece.versions}:
            note_digest(each.digests, version, known.get(version, ""))
        if not piece.end:
            if not each.ticket.streams:
                return None
            return each, Piece(each.sample, piece.token_ids, piece.logprobs, piece.versions, None, each.digests)
        del self._placed[each.number]
        self._tickets[each.ticket].remove(each)
        if piece.end == REFUSED:
            _call(each.loop, each.ticket.fail, RequestRefused(piece.text))
            return None
        self._homes.note([*each.prompt, *each.token_ids], rollout)
        tokens = each.token_ids, each.logprobs
        end = Completion(each.number, each.prompt, *tokens, finish_reason=piece.end, text=piece.text)
        if each.ticket.streams:
            return each, Piece(each.sample, piece.token_ids, piece.logprobs, piece.versions, end, each.digests)
        return each, Piece(each.sample, *tokens, each.versions, end, each.digests)

    def _note_digest(self, rollout: str, message: ServedTokens) -> None:
        known = self._digests.setdefault(rollout, {})
        known.pop(message.version, None)
        known[message.version] = message.digest
        if len(known) > _KNOWN_VERSIONS:
            del known[next(iter(known))]

    def _look(self) -> None:
        """Notice rollouts that have come and gone: sequences of those that are gone go to others."""
        living = {member.name: member.incarnation for member in self._fleet.alive_members("rollout", having=SERVES)}
        with self._lock:
            if self.ended:
                return
            gone = {name for name, number in self._rollouts.items() if living.get(name) != number}
            for each in [each for each in self._placed.values() if each.rollout in gone]:
                del self._placed[each.number]
                each.rollout = ""
                self._waiting.append(each)
            for name in sorted(gone):
                log.info("%s is gone; %d sequences wait for a rollout", name, len(self._waiting))
            new = [name for name, number in living.items() if self._rollouts.get(name) != number]
            self._rollouts = living
            for name in new:
                self._send(name, ServeSequences(self._fleet.incarnation, is_first=True))
            self._place()

    # ---------------------------------------------------------------------------------------------- both, under the lock

    def _place(self) -> None:
        """Send the waiting sequences to rollouts, if there are any."""
        if not self._rollouts or not self._waiting:
            return
        load = dict.fromkeys(self._rollouts, 0)
        for each in self._placed.values():
            load[each.rollout] += 1
        batches: dict[str, list[list[_Open]]] = {}
        for together in _alike(self._waiting):
            rollout = self._choose(together[0], load)
            load[rollout] += len(together)
            for each in together:
                each.rollout = rollout
                each.number = next(self._numbers)
                self._placed[each.number] = each
            batches.setdefault(rollout, []).append(together)
        self._waiting = []
        for rollout, alike in batches.items():
            self._begin(rollout, alike)

    def _choose(self, each: _Open, load: dict[str, int]) -> str:
        """The rollout with the fewest sequences, or the one that has the beginning of the prompt in its cache."""
        least = min(load, key=lambda name: (load[name], name))
        home = self._homes.find([*each.prompt, *each.token_ids])
        if home in load and load[home] <= max(2 * load[least], load[least] + _BUSIER):
            return home
        return least

    def _begin(self, rollout: str, batches: Iterable[list[_Open]]) -> None:
        begin: list[ServedPrompt] = []
        num_tokens = 0
        for together in batches:
            first = together[0]
            size = len(first.prompt) + sum(len(each.token_ids) for each in together)
            if begin and num_tokens + size > _MESSAGE_TOKENS:
                self._send(rollout, ServeSequences(self._fleet.incarnation, begin))
                begin = []
                num_tokens = 0
            samples = [ServedSample(each.number, each.key, each.ticket.streams, each.token_ids) for each in together]
            begin.append(ServedPrompt(first.prompt, asdict(first.params), samples))
            num_tokens += size
        self._send(rollout, ServeSequences(self._fleet.incarnation, begin))

    def _send(self, rollout: str, message: ServeSequences) -> None:
        self._mailbox.send(rollout, message)

    def _over(self) -> RequestRefused:
        return RequestRefused(f"the run has ended ({self.ended})", status=503, code="run_ended")


def _alike(waiting: Iterable[_Open]) -> list[list[_Open]]:
    """Sequences in their order, with the responses of one prompt together, a few at a time."""
    found: list[list[_Open]] = []
    for each in waiting:
        last = found[-1][0] if found else None
        is_alike = last is not None and last.prompt is each.prompt and last.params == each.params
        if is_alike and len(found[-1]) < _TOGETHER:
            found[-1].append(each)
        else:
            found.append([each])
    return found


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], argument: Any) -> None:
    with suppress(RuntimeError):  # the loop has ended, and its requests with it
        loop.call_soon_threadsafe(function, argument)
