"""The samples of the run that agents generate: leased from the hub when agents ask for them, scored and written when they end.

The thread of the event loop claims and finishes samples; the thread that reads the front's messages does the rest. Neither waits for the
other one. What is leased and not claimed yet waits for the next agent, since the samples of a group are leased together.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from ....comm.fleet import Fleet
from ....comm.mailbox import Mailbox
from ....comm.messages import DrawnTokens, LeaseGrant
from ....comm.recipe import Recipe
from ....relay.queue.replicated_rows import ReplicatedRows
from ....relay.queue.schedules import schedule_of
from ...engine.sequence import Completion
from ...leased_row import LeasedRow
from ...leases import HeldLeases
from ...pacing import RolloutPacing
from ...rewards.pool import Rewards
from ...row_writer import RowWriter, Writer
from ...scoring import Scoring
from ..fields import RequestRefused

_log = logging.getLogger(__name__)


class AgentSamples:
    """Leases of one front process. `take`, `give_back` and `finish` belong to the thread of the event loop, the rest to the other one."""

    def __init__(
        self, fleet: Fleet, recipe: Recipe, mailbox: Mailbox, rewards: Rewards, row_writer: Writer | None = None
    ) -> None:
        """mailbox: the front's; its owner passes the grants on."""
        self._mailbox = mailbox
        self._incarnation = fleet.incarnation
        # It takes new weights in the middle of its trajectories, so it has no share after which it would drain.
        pacing = RolloutPacing(schedule_of(recipe.run, recipe.rollout), share=None)
        self.leases = HeldLeases(mailbox, fleet.incarnation, recipe.batch.samples_per_prompt, pacing)
        self._row_writer = row_writer or RowWriter(mailbox, ReplicatedRows(fleet), recipe.comm.deadline_s)
        self._scoring = Scoring(rewards, recipe.reward, self.leases, self._row_writer)
        self._version = -1
        self._num_offered = 0
        """Samples that this thread has offered to the other one."""
        self._ended: deque[tuple[LeasedRow, Completion | None, str]] = deque()
        # Of the event loop's thread:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free: deque[LeasedRow] = deque()
        self._num_waiting = 0
        self._arrivals: list[asyncio.Future[None]] = []
        self._num_received = 0
        self._refusal: RequestRefused | None = None

    # ---------------------------------------------------------------------------------------- the thread of the event loop

    async def take(self, timeout_s: float) -> LeasedRow:
        """A sample for an agent. Raises `TimeoutError` if the hub grants none in this time, `RequestRefused` if the run has ended."""
        self._loop = asyncio.get_running_loop()
        self._num_waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if self._refusal is not None:
                        raise self._refusal
                    while self._free:
                        if self._is_held(held := self._free.popleft()):
                            return held
                    self._arrivals.append(self._loop.create_future())
                    await self._arrivals[-1]
        finally:
            self._num_waiting -= 1

    def give_back(self, held: LeasedRow) -> None:
        """Let another agent have a sample that its agent has never used."""
        self._receive([held], num_offered=0)

    def finish(self, held: LeasedRow, completion: Completion | None, failure: str = "") -> None:
        """End a sample, with what `rows.completed` has given it, or with the reason why it has failed."""
        self._ended.append((held, completion, failure))

    def _receive(self, rows: Sequence[LeasedRow], num_offered: int) -> None:
        self._num_received += num_offered
        self._free += rows
        self._wake()

    def _refuse(self, error: RequestRefused) -> None:
        self._refusal = error
        self._wake()

    def _wake(self) -> None:
        """All that wait look again; a sample that one of them does not take any more is left to the others."""
        arrivals = self._arrivals
        self._arrivals = []
        for arrival in arrivals:
            if not arrival.done():
                arrival.set_result(None)

    def _is_held(self, held: LeasedRow) -> bool:
        """Whether its lease has not been given to another object meanwhile."""
        return self.leases.held.get(held.row_id.number) is held

    # ---------------------------------------------------------------------------------------------------- the other thread

    def start(self) -> None:
        """Start the thread that writes rows."""
        self._row_writer.start()

    def advance(self, version: int) -> None:
        """Score and write what has ended, and ask the hub for as many samples as agents wait for.

        version: the oldest of the rollouts' weights; nothing is leased before there is one.
        """
        while self._ended:
            held, completion, failure = self._ended.popleft()
            if not self._is_held(held):
                _log.info("sample %s is dropped: it was leased again", held.row_id)
                continue
            held.tokens_then = DrawnTokens(self._incarnation)
            if completion is None:
                self._scoring.fail(held, failure)
            else:
                self._scoring.score(held, completion, failure)
        self._scoring.advance()
        if version < 0:
            return
        if version != self._version:
            self._version = version
            self.leases.begin_version(version)
        on_their_way = self._num_offered - self._num_received
        if (room := self._num_waiting - len(self._free) - on_their_way) > 0:
            self.leases.ask(version, room)

    def handle(self, grant: LeaseGrant) -> None:
        """Offer the samples of a grant to the agents that wait."""
        rows = [held for _, fresh in self.leases.take(grant, self._version) for held in fresh]
        if not rows:
            return
        assert self._loop is not None, "only what agents wait for is asked for"
        self._num_offered += len(rows)
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._receive, rows, len(rows))

    def close(self, how: str) -> None:
        """The run has ended in this way: refuse the claims, write what has ended, tell the hub what is left unfinished."""
        error = RequestRefused(f"the run has ended ({how})", status=410, code="run_ended")
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._refuse, error)
        self.advance(-1)
        self._row_writer.close()
        self._mailbox.send("hub", replace(self.leases.held_rows(), drawn=DrawnTokens(self._incarnation)))
        self._scoring.close()
