"""Between the front and the generator: requests go to the thread of the generator, tokens come back. Neither waits for the other.

The front submits and releases in the thread of its event loop. The thread of the generator calls `admit` before a step and
`deliver` after it. What a step gives is sent to the loop in one call, where it waits for the clients, however slow they are: no
response is longer than the context.
"""

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..engine.sampling import SamplingParams
from ..engine.sequence import Completion, SequenceProgress, SequenceState
from ..engine.streams import stream_key
from .fields import RequestRefused


class ServedGenerator(Protocol):
    """What serving needs of a generator. See `generators.base.Generator`."""

    @property
    def idle(self) -> bool:
        """Whether it holds no trajectory."""
        ...

    def step(self) -> list[Completion]:
        """Advance the trajectories; returns the finished ones."""
        ...

    def unfinished(self) -> list[SequenceProgress]:
        """Every unfinished trajectory."""
        ...

    def responses(self) -> list[SequenceState]:
        """Every unfinished trajectory, with its response so far."""
        ...

    def import_sequences(self, states: Sequence[SequenceState]) -> None:
        """Begin or continue trajectories."""
        ...

    def export_sequences(self, trajectory_ids: Sequence[int], with_cache: bool = False) -> list[SequenceState]:
        """Remove unfinished trajectories."""
        ...


GATHER_S = 0.05
"""Requests that arrive together are gathered for so long at most, in CPU time of the event loop's thread."""
_LOOP_TURNS = 4
"""Turns of an event loop from a new connection to its request at the desk: accepted, read, parsed, submitted."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of a response, each with its log-prob and the version of the weights that drew it.

    With its `end`, the whole response as the generator returned it.
    """

    sample: int
    """The place of the response among those of its request."""
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    end: Completion | None = None
    digests: Mapping[int, str] = field(default_factory=dict[int, str])
    """Of the weights of these versions, and maybe of others; "" for one that is not known."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way: prompts, each with `params.n` responses. Its pieces arrive in the thread of the event loop."""

    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]
    """Of each prompt; each has a seed."""
    streams: bool
    """Whether tokens are delivered as they come, and not only with the end of a response."""
    _pieces: deque[Piece] = field(default_factory=deque)
    _failure: RequestRefused | None = None
    _arrival: "asyncio.Future[None] | None" = None

    @property
    def num_samples(self) -> int:
        """Responses of all prompts."""
        return sum(params.n for params in self.params)

    def put(self, piece: Piece) -> None:
        """Add a piece."""
        self._pieces.append(piece)
        self._wake()

    def fail(self, error: RequestRefused) -> None:
        """End the request: `next` raises this error behind the pieces that are there."""
        self._failure = error
        self._wake()

    async def next(self, timeout_s: float) -> Piece:
        """The next piece. Raises `TimeoutError`, and the error of `fail`."""
        # `asyncio.wait_for` would lose a cancellation that comes together with a piece (Python 3.11).
        async with asyncio.timeout(timeout_s):
            while not self._pieces:
                if self._failure is not None:
                    raise self._failure
                self._arrival = asyncio.get_running_loop().create_future()
                await self._arrival
        return self._pieces.popleft()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


@dataclass(slots=True)
class _Served:
    """A sequence of a ticket in the generator."""

    ticket: Ticket
    sample: int
    num_sent: int = 0


class AnyDesk(Protocol):
    """What a front needs of a desk; all of it belongs to the front's thread."""

    @property
    def version(self) -> int:
        """The newest version of the weights that draw tokens."""
        ...

    def submit(self, ticket: Ticket) -> None:
        """Queue a request. Raises `RequestRefused`, with the status 429 where too many wait."""
        ...

    def release(self, ticket: Ticket) -> None:
        """Forget a request that was submitted: it is answered, or its client has left. What is unfinished is dropped."""
        ...

    def late(self, ticket: Ticket, timeout_s: float) -> RequestRefused:
        """The error of a request that has no answer after so many seconds."""
        ...


class Desk:
    """Requests that wait or run. `submit` and `release` belong to the front's thread, the rest to the generator's."""

    def __init__(self, most_samples: int, version: int = 0, digest: str = "") -> None:
        """most_samples: responses that may wait or run; a request beyond is refused, and its client told to come back.

        version, digest: those of the generator's weights, which do not change.
        """
        self.num_samples = 0
        """Responses that were asked for and have not ended, as the front knows."""
        self.version = version
        self._digests = {version: digest}
        self._most_samples = most_samples
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arriving: list[Ticket] = []
        """Requests of the last moment, to which others may come."""
        self._new: deque[Ticket] = deque()
        self._cancelled: deque[Ticket] = deque()
        self._has_work = threading.Event()
        self._served: dict[int, _Served] = {}
        self._numbers = itertools.count()

    # ------------------------------------------------------------------------------------------------ the front's thread

    def submit(self, ticket: Ticket) -> None:
        """Queue a request. Raises `RequestRefused`, with the status 429 where too many wait."""
        check_room(ticket, self.num_samples, self._most_samples)
        self._loop = asyncio.get_running_loop()
        self.num_samples += ticket.num_samples
        self._arriving.append(ticket)
        if len(self._arriving) == 1:
            once_quiet(self._loop, lambda: len(self._arriving), self._pass_on)

    def release(self, ticket: Ticket) -> None:
        """Forget a request: it is answered, or its client has left. What is unfinished is dropped before the next step."""
        self.num_samples -= ticket.num_samples
        if ticket in self._arriving:
            self._arriving.remove(ticket)
            return
        self._cancelled.append(ticket)
        self._has_work.set()

    def _pass_on(self) -> None:
        """Give the generator's thread the requests that have arrived: a batch costs hardly more than the first of them alone."""
        self._new.extend(self._arriving)
        self._arriving = []
        self._has_work.set()

    def late(self, ticket: Ticket, timeout_s: float) -> RequestRefused:
        """The error of a request that has no answer after so many seconds."""
        problem = f"the request took longer than {timeout_s:g} s, the limit of this server (--timeout)"
        return RequestRefused(problem, status=504, code="timeout")

    # -------------------------------------------------------------------------------------------- the generator's thread

    def turn(self, generator: ServedGenerator, wait_s: float) -> None:
        """Begin and drop sequences, then take a step of the generator; where it has none, wait for a request so long."""
        self.admit(generator)
        if generator.idle:
            self._has_work.wait(wait_s)
        else:
            self.deliver(generator, generator.step())

    @property
    def num_served(self) -> int:
        """Sequences of requests in the generator."""
        return len(self._served)

    def admit(self, generator: ServedGenerator) -> None:
        """Drop what was cancelled, and begin what is new."""
        self._has_work.clear()
        # In this order: what is cancelled was submitted before, so it is among the new ones or the served ones by now.
        gone: set[Ticket] = set()
        while self._cancelled:
            gone.add(self._cancelled.popleft())
        while self._new:
            ticket = self._new.popleft()
            if ticket in gone:
                continue
            states: list[SequenceState] = []
            for prompt, params in zip(ticket.prompts, ticket.params, strict=True):
                assert params.seed is not None
                one = replace(params, n=1)
                for stream in range(params.n):
                    number = next(self._numbers)
                    self._served[number] = _Served(ticket, len(states))
                    states.append(SequenceState(number, stream_key(params.seed, stream), one, list(prompt), [], []))
            generator.import_sequences(states)
        self._drop(generator, gone)

    def deliver(self, generator: ServedGenerator, completions: Sequence[Completion]) -> None:
        """Send the tokens of a step to the front."""
        pieces: list[tuple[Ticket, Piece]] = []
        for done in completions:
            served = self._served.pop(done.trajectory_id, None)
            if served is not None:  # else it was dropped in the step that ended it
                pieces.append((served.ticket, self._piece(served, done.token_ids, done.logprobs, done)))
        if any(served.ticket.streams for served in self._served.values()):
            for state in generator.responses():
                served = self._served.get(state.trajectory_id)
                if served is None or not served.ticket.streams or len(state.token_ids) == served.num_sent:
                    continue
                pieces.append((served.ticket, self._piece(served, state.token_ids, state.logprobs)))
                served.num_sent += len(pieces[-1][1].token_ids)
        if pieces:
            assert self._loop is not None, "there are tokens, so there was a request"
            self._loop.call_soon_threadsafe(spread, pieces)

    def _piece(
        self, served: _Served, token_ids: list[int], logprobs: list[float], end: Completion | None = None
    ) -> Piece:
        new = token_ids[served.num_sent :]
        versions = [self.version] * len(new)
        return Piece(served.sample, new, logprobs[served.num_sent :], versions, end, self._digests)

    def _drop(self, generator: ServedGenerator, gone: set[Ticket]) -> None:
        numbers = {number for number, served in self._served.items() if served.ticket in gone} if gone else set()
        if not numbers:
            return
        for number in numbers:
            del self._served[number]
        # One that has just ended is in no list of unfinished ones; the next step returns it, and it is dropped there.
        generator.export_sequences(
            [live.trajectory_id for live in generator.unfinished() if live.trajectory_id in numbers]
        )


def once_quiet(loop: asyncio.AbstractEventLoop, count: Callable[[], int], then: Callable[[], object]) -> None:
    """Call `then` once a few turns of the loop have brought no new request, at the latest after `GATHER_S`. In the loop's thread.

    count: of the requests so far. While the loop has nothing else to do, its turns take no time.
    """
    until = time.thread_time() + GATHER_S

    def turn(num_left: int, known: int) -> None:
        found = count()
        if found != known:
            num_left = _LOOP_TURNS
        if num_left and time.thread_time() < until:
            loop.call_soon(turn, num_left - 1, found)
        else:
            then()

    turn(_LOOP_TURNS, count())


def check_room(ticket: Ticket, num_samples: int, most_samples: int) -> None:
    """Raise `RequestRefused` if a request does not fit beside so many responses that wait or run."""
    if ticket.num_samples > most_samples:
        raise RequestRefused(f"{ticket.num_samples} responses; this server takes {most_samples} at a time", "n")
    if num_samples + ticket.num_samples > most_samples:
        problem = f"{num_samples} responses wait or run, and this server takes {most_samples}; try again later"
        raise RequestRefused(problem, status=429, code="too_many_requests")


def spread(pieces: Sequence[tuple[Ticket, Piece]]) -> None:
    """Give pieces to their requests, in the thread of the event loop."""
    for ticket, piece in pieces:
        ticket.put(piece)
