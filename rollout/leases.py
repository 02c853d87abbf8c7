"""The leases of a rollout: it requests them from the hub, and holds their trajectories until they are finished."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec.structs import replace

from ..comm.clock import REAL_TIME, Clock
from ..comm.messages import GroupId, HeldRows, Lease, LeaseGrant, LeaseRequest, LeaseReturn, PromptRefused
from .leased_row import LeasedRow

if TYPE_CHECKING:
    from ..comm.mailbox import Mailbox
    from .pacing import RolloutPacing

_log = logging.getLogger(__name__)

REPEAT_S = 2.0


class RowHolder(Protocol):
    """Keeps the trajectories that are under way, by `RowId.number`: leases of a rollout, or samples without a hub."""

    held: dict[int, LeasedRow]


class HeldLeases:
    """Requests groups, one request at a time, and keeps the rows held; `held` is by `RowId.number`."""

    def __init__(
        self,
        mailbox: "Mailbox",
        incarnation: int,
        samples_per_prompt: int,
        pacing: "RolloutPacing",
        *,
        can_continue: bool = False,
        is_bounded: bool = False,
        clock: Clock = REAL_TIME,
    ) -> None:
        """`can_continue`: this rollout continues trajectories that another began. `is_bounded`: staleness has a bound."""
        self.held: dict[int, LeasedRow] = {}
        self._mailbox = mailbox
        self._samples_per_prompt = samples_per_prompt
        self._pacing = pacing
        self._clock = clock
        self._digests: dict[int, str] = {}
        """Of the present version's weights."""
        self._taken = 0
        self._window = 0
        """The newest of the hub's windows."""
        self.can_continue = can_continue
        self._is_bounded = is_bounded
        self._evaluates = False
        """More prompts of an evaluation of the present version may be left."""
        # The ids of each incarnation are new: an answer to an earlier one may still be in the inbox.
        self._request = LeaseRequest(incarnation << 32, -1, 0)
        self._answered = self._request.request_id
        self._granted = -1
        """The newest request whose first answer had leases."""
        self._is_asking = False
        self._asked_at = 0.0

    @property
    def mixes_versions(self) -> bool:
        """Whether several versions may generate a trajectory for training."""
        return self._pacing.rules.mixes_versions

    @property
    def pins_version(self) -> bool:
        """Whether an evaluation needs the present version: samples of it run here, or more of its prompts may be left."""
        return self._evaluates or any(
            held.completion is None for held in self.held.values() if held.row_id.is_evaluation
        )

    def begin_version(self, version: int, digest: str = "") -> None:
        """Reset the share after a change of weights, and drop an open request. digest: of these weights, if it is known."""
        self._digests = {version: digest} if digest else {}
        self._is_asking = False
        self._taken = 0
        self._evaluates = False

    def drained(self) -> None:
        """Reset the share, because nothing is held."""
        self._taken = 0

    def ask(self, version: int, room: int, *, is_outdated: bool = False) -> None:
        """Request groups for `room` trajectories, at most the rest of the share. An open request is repeated instead.

        While an evaluation may have prompts left it requests those alone, even if a newer version is out.
        """
        if self._is_asking:
            if self._clock.now() - self._asked_at > REPEAT_S:
                self._send()
            return
        groups = math.ceil(room / self._samples_per_prompt)
        if not self._evaluates and is_outdated:
            return
        if not self._evaluates:
            groups = int(min(groups, self._pacing.share_of(self._window) - self._taken))
        if groups > 0:
            number = self._request.request_id + 1
            self._request = LeaseRequest(number, version, groups, self.can_continue, self._evaluates)
            self._is_asking = True
            self._send()

    def take(self, grant: LeaseGrant, version: int) -> list[tuple[Lease, list[LeasedRow]]]:
        """The groups of a grant with the trajectories to start, on `version`.

        A grant for another version goes back to the hub, unless the weights are newer and it answers the present request, or versions
        may mix: they have changed since. On older ones, taken for an evaluation or to continue another's trajectories, its groups
        would be due earlier than the hub has planned. So do leases that come for a request after an answer without any.
        """
        if self.is_answered(grant):
            # A second answer to a repeated request has no other leases than the first one. But a hub that died may have answered
            # without leases, which no journal has, and its next process, which reads the request again, with some.
            if grant.leases and grant.request_id != self._granted:
                self._return(grant)
            return []
        self._note_answer(grant)
        may_be_newer = grant.request_id == self._request.request_id or self.mixes_versions
        if grant.version > version or (grant.version < version and not may_be_newer):
            self._return(grant)
            return []
        self._evaluates = grant.is_evaluation
        self._window = grant.window or self._window
        self._taken += 0 if grant.is_evaluation else len(grant.leases)
        return [(lease, self._hold(lease, version, grant.version)) for lease in grant.leases]

    def too_old(self, grant: LeaseGrant) -> list[LeasedRow]:
        """Unfinished trajectories here that a grant leases again, as younger ones than they are: they began on a version before.

        The hub took this rollout for dead, and does not know of their first tokens. They would be due earlier than it has planned.
        """
        if self.is_answered(grant):
            return []
        again = (
            (lease, sample, self.held.get(lease.group.row(sample).number))
            for lease in grant.leases
            for sample in lease.samples
        )
        return [
            held
            for lease, sample, held in again
            if held is not None and held.completion is None and not self._may_go_on(held, lease, grant.version)
        ]

    def own(self, grant: LeaseGrant) -> set[GroupId]:
        """The groups of a grant with samples that are held here already, since the hub took this rollout for dead."""
        return {
            lease.group
            for lease in grant.leases
            if any(lease.group.row(sample).number in self.held for sample in lease.samples)
        }

    def give_back(self, grant: LeaseGrant, is_refused: Callable[[GroupId], bool]) -> LeaseGrant:
        """Return the leases of some groups of a new grant; returns the grant with the others."""
        self._granted = grant.request_id
        if refused := [lease for lease in grant.leases if is_refused(lease.group)]:
            self._return(replace(grant, leases=refused))
        return replace(grant, leases=[lease for lease in grant.leases if not is_refused(lease.group)])

    def is_answered(self, grant: LeaseGrant) -> bool:
        """Whether this request has had an answer before."""
        return grant.request_id <= self._answered

    def refuse(self, grant: LeaseGrant, *, is_gone: bool) -> None:
        """Return a whole grant, as the answer to its request; `is_gone`: no process has its version any more."""
        self._note_answer(grant)
        self._return(grant, is_gone=is_gone)

    def refuse_prompt(self, rows: Sequence[LeasedRow], reason: str) -> None:
        """Give up the rows of a group: no rollout can use its prompt."""
        for held in rows:
            del self.held[held.row_id.number]
        self._mailbox.send("hub", PromptRefused(rows[0].row_id.group, rows[0].attempt, reason))

    def held_rows(self, *moving: LeasedRow) -> HeldRows:
        """The message that names every row held, and those `moving` that no other rollout has claimed."""
        rows = [*self.held.values(), *moving]
        return HeldRows([row.row_id for row in rows], [row.attempt for row in rows], self._request.incarnation)

    def _hold(self, lease: Lease, version: int, granted: int) -> list[LeasedRow]:
        row = msgspec.json.decode(lease.row)
        fresh: list[LeasedRow] = []
        for sample in lease.samples:
            row_id = lease.group.row(sample)
            held = self.held.get(row_id.number)
            if held is not None and self._may_go_on(held, lease, granted):
                # The hub took this rollout for dead and then leased it its own row: generation continues.
                held.attempt = lease.attempt
                held.claim_id = 0
            else:
                fresh.append(LeasedRow(row_id, lease.attempt, version, row, digests={**self._digests}))
        self.held |= {held.row_id.number: held for held in fresh}
        return fresh

    def _may_go_on(self, held: LeasedRow, lease: Lease, granted: int) -> bool:
        """Whether a row held goes on as a new lease: it is no older than the hub has planned, or its age does not matter."""
        if self.mixes_versions and not self._is_bounded:
            return True
        partials = (first.version for first in lease.partials if first.row.sample == held.row_id.sample)
        return held.version >= next(partials, granted)

    def _note_answer(self, grant: LeaseGrant) -> None:
        self._answered = grant.request_id
        self._granted = grant.request_id if grant.leases else self._granted
        self._is_asking = self._is_asking and grant.request_id != self._request.request_id

    def _return(self, grant: LeaseGrant, *, is_gone: bool = False) -> None:
        groups = [lease.group for lease in grant.leases]
        attempts = [lease.attempt for lease in grant.leases]
        why = "no process has that version" if is_gone else "the weights here are others"
        _log.info("%d groups returned that were leased for version %d: %s", len(groups), grant.version, why)
        self._mailbox.send("hub", LeaseReturn(groups, attempts, is_gone))

    def _send(self) -> None:
        self._asked_at = self._clock.now()
        self._mailbox.send("hub", self._request)
