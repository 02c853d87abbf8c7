"""Leases: rollouts ask for groups, and get as many as admission allows."""

import logging
import math
from typing import TYPE_CHECKING

import msgspec

from ...comm.messages import DrainRequested, Lease, LeaseGrant, LeaseRequest, LeaseReturn, Stop
from ..dataset.rows import MAX_ROW_BYTES
from ..journal import events as ev
from ..journal.records import Grant, RowStatus
from .context import Handler, HubContext
from .lease_choice import Choice, LeaseChooser

if TYPE_CHECKING:
    from ..queue.admission import Admission
    from .evaluations import Evaluations
    from .partial_pool import PartialPool
    from .prompts import Prompts

log = logging.getLogger(__name__)


class Leases(Handler):
    """Open requests, the newest request of each holder, and the leases that a dead or drained holder had."""

    def __init__(
        self,
        context: HubContext,
        prompts: "Prompts",
        admission: "Admission",
        partials: "PartialPool",
        evaluations: "Evaluations",
    ) -> None:
        super().__init__(context)
        self.prompts = prompts
        self.evaluations = evaluations
        self.admission = admission
        self.partials = partials
        self._chooser = LeaseChooser(self.state, admission, partials)
        self._requests: dict[str, LeaseRequest] = {}
        self._empty: dict[str, int] = {}
        """The last request of each holder that was answered without leases; the journal has none for it."""
        grants = self.state.grants.items()
        self._newest = {holder: LeaseRequest(grant.request_id, grant.version, 0) for holder, grant in grants}
        self.routes = {LeaseRequest: self._on_request, LeaseReturn: self._on_return, DrainRequested: self._on_drain}

    def advance(self) -> None:
        state = self.state
        has_work = state.unassigned or self.evaluations.prompts is not None or self.admission.free_places(state)
        if not self.context.is_leasing or self.context.awaits_queue or not has_work:
            return  # at scale hundreds ask, and most messages change nothing for them
        refused: set[int | None] = set()  # a version that admission refuses is refused to all holders
        requests = list(self._requests.items())
        for num_asking, (holder, request) in zip(range(len(requests), 0, -1), requests, strict=True):
            if self._grant_evaluation(holder, request):
                continue
            version = None if self._may_go_back(holder, request) else request.version
            if version in refused:
                continue
            share = math.ceil(self.admission.free_places(state) / num_asking)
            if not self._grant(holder, request, version, share):
                refused.add(request.version)

    def on_process_death(self, process: str, reason: str) -> None:
        """The rows leased to a process are wanted again."""
        self._requests.pop(process, None)
        leased = list(self.state.held.get(process, {}).items())
        for group, attempt in dict.fromkeys((row_id.group, row.attempt) for row_id, row in leased):
            self.context.commit(ev.Returned(group=group, attempt=attempt, reason=reason))
        # The process may have died between writing a row and reporting it: those bytes have no reader.
        self.context.drop_rows(row_id for row_id, _ in leased if not row_id.is_evaluation)

    def repeat_grants(self) -> None:
        """Send the last grant of each holder again: the previous hub may not have sent it. A holder that has it ignores it.

        The same goes for the end of a drained process.
        """
        for holder, grant in self.state.grants.items():
            self.context.mailbox.send(holder, self._rest_of(holder, grant))
        for member in self.state.drained:
            self._stop_if_empty(member)

    def _on_request(self, sender: str, request: LeaseRequest) -> None:
        """Note a request, or repeat what is left of the grant whose message was lost or crossed the repeated request.

        A request of a dead process may arrive after the report of its death. It is granted, since such a report may be in
        error, and the lease comes back when the next incarnation asks; from then on the dead one is ignored.
        """
        newest = self._newest.setdefault(sender, request)
        if request.request_id < newest.request_id:
            return
        if request.incarnation > newest.incarnation:
            self.on_process_death(sender, f"incarnation {newest.incarnation} is gone")
        self._newest[sender] = request
        granted = self.state.grants.get(sender)
        if granted is not None and granted.request_id == request.request_id:
            self.context.mailbox.send(sender, self._rest_of(sender, granted))
        elif self._empty.get(sender) == request.request_id:  # a grant under an answered number would never be taken
            self.context.mailbox.send(sender, LeaseGrant(request.request_id, request.version, []))
        elif sender in self.state.drained:
            self._stop_if_empty(sender)
        else:
            self._requests[sender] = request

    def _on_drain(self, _sender: str, message: DrainRequested) -> None:
        """Grant this rollout nothing more. It asks for leases as soon as it has room, and stops when it asks without any.

        Another process, such as a relay, has no leases and stops at once.
        """
        log.info(
            "%s is drained: it gets no more leases, and has %d rows",
            message.member,
            len(self.state.held.get(message.member, ())),
        )
        self.context.commit(ev.Drained(member=message.member))
        if self._requests.pop(message.member, None) is not None or not message.member.startswith("rollout-"):
            self._stop_if_empty(message.member)

    def stop(self, holder: str) -> None:
        """Grant a rollout nothing more, and end it once it has no lease."""
        self.context.commit(ev.Drained(member=holder))
        self._stop_if_empty(holder)

    def _stop_if_empty(self, holder: str) -> None:
        if holder not in self.state.held:
            self.context.mailbox.send(holder, Stop("drained"))

    def _rest_of(self, holder: str, grant: Grant) -> LeaseGrant:
        """The grant with the leases that the holder still has. With none of them, the holder asks again."""
        leases: list[Lease] = []
        for group_id, attempt in grant.leases:
            rows = group.rows if (group := self.state.group(group_id)) is not None else []
            held = (RowStatus.LEASED, holder, attempt)
            if samples := [s for s, row in enumerate(rows) if (row.status, row.holder, row.attempt) == held]:
                evaluated = self.evaluations.prompts if group_id.is_evaluation else None
                leases.append(Lease(group_id, attempt, samples, msgspec.Raw((evaluated or self.prompts).row(group_id))))
        return LeaseGrant(grant.request_id, grant.version, leases, self.admission.shared_window(self.state))

    def _on_return(self, sender: str, message: LeaseReturn) -> None:
        reason = "its version is gone" if message.is_gone else f"{sender} switched to another version"
        returned = [self.state.group(group_id) for group_id in message.groups]
        for group, attempt in zip(returned, message.attempts, strict=True):
            if group is None:
                continue
            self.context.commit(ev.Returned(group=group.id, attempt=attempt, reason=reason))
            if message.is_gone and not group.id.is_evaluation:
                self.partials.give_up(group.row_ids(RowStatus.WANTED))
        if message.is_gone and any(group_id.is_evaluation for group_id in message.groups):
            self.evaluations.give_up(reason)

    def _grant_evaluation(self, holder: str, request: LeaseRequest) -> bool:
        """Answer with prompts of an evaluation, or without leases if the holder wants nothing else; returns whether it has an answer."""
        version, prompts = self.evaluations.lease(holder, request, self.state.samples_per_prompt)
        if not prompts and not request.only_evaluation:
            return False
        self._empty[holder] = -1 if prompts else request.request_id
        self._answer(holder, LeaseGrant(request.request_id, version, prompts))
        return True

    def _may_go_back(self, holder: str, request: LeaseRequest) -> bool:
        """Whether a rollout may continue trajectories of a dead one on an older version than its own: it has no work of its own."""
        has_begun = request.can_continue and self.partials.rows and self.state.unassigned
        return bool(has_begun) and holder not in self.state.held

    def _grant(self, holder: str, request: LeaseRequest, version: int | None, share: int) -> bool:
        """Lease groups to a holder, at most `share` new ones, since one that decodes all of them alone is slow.

        version: as in `LeaseChooser.choose`. Returns whether another holder of the same version may still get some.
        """
        leases: list[Lease] = []
        num_bytes = 0
        num_new = 0
        is_refused = False
        while len(leases) < request.num_groups and num_bytes < MAX_ROW_BYTES // 2:
            may_be_new = num_new < share
            choice = self._choose_usable(request, version, may_be_new=may_be_new)
            lease = self._lease(holder, request, choice) if choice is not None else None
            if choice is None or lease is None:
                is_refused = may_be_new and version in (None, request.version)
                break
            leases.append(lease)
            version = choice.version
            num_new += choice.group is None
            num_bytes += len(lease.row)
        if leases and version is not None:
            self._answer(
                holder, LeaseGrant(request.request_id, version, leases, self.admission.shared_window(self.state))
            )
        return not is_refused

    def _answer(self, holder: str, grant: LeaseGrant) -> None:
        del self._requests[holder]
        self.context.mailbox.send(holder, grant)

    def _choose_usable(self, request: LeaseRequest, version: int | None, *, may_be_new: bool) -> Choice | None:
        while choice := self._chooser.choose(request, version, may_be_new=may_be_new):
            if choice.group is None or self.prompts.is_usable(choice.group.id):
                break  # else its prompt is dropped now
        return choice

    def _lease(self, holder: str, request: LeaseRequest, choice: Choice) -> Lease | None:
        """Lease what was chosen; None if the data has no prompt for it."""
        if (group := choice.group) is None:
            if (found := self.prompts.next()) is None:
                return None
            group_id, passed_over = found
            samples = list(range(self.state.samples_per_prompt))
            attempt = 1
        else:
            group_id = group.id
            passed_over = 0
            samples = group.samples(RowStatus.WANTED)
            attempt = group.next_attempt
            if choice.starts_again:
                self.partials.give_up(group.row_ids(RowStatus.WANTED))
        answered = {"version": choice.version, "holder": holder, "request_id": request.request_id}
        oldest = min((partial.version for partial in choice.partials.values()), default=choice.version)
        if oldest < choice.version:
            answered["oldest"] = oldest
        self.context.commit(
            ev.Leased(group=group_id, samples=samples, attempt=attempt, passed_over=passed_over, **answered)
        )
        row = msgspec.Raw(self.prompts.row(group_id))
        return Lease(group_id, attempt, samples, row, tuple(choice.partials.values()))
