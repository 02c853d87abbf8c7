"""The hub: the one decision maker. It reads its mailbox, decides, appends to the journal, applies, and acts.

It never carries bulk data and never waits for anybody: a request that cannot be met yet stays on the list and is looked at
again after the next letter.
"""

import logging
from collections.abc import Callable

from ..comm.mailbox import Letter, Mailbox
from ..comm.messages import (
    CheckpointWritten,
    DropRows,
    GroupId,
    GroupRef,
    HandOut,
    Lease,
    LeaseGrant,
    LeaseRequest,
    LeaseReturn,
    Load,
    Pulled,
    RowDone,
    RowId,
    StepTrained,
    TakeGroups,
    VersionComplete,
)
from . import events as ev
from .admission import Admission
from .journal import Journal, stamped
from .prompts import PromptPool
from .settings import QueueSettings
from .state import Group, HubState, RowStatus, apply
from .telemetry import Telemetry

log = logging.getLogger(__name__)


class Hub:
    """Decisions about leases, rows and hand-outs; every change of `state` goes through `decide`."""

    def __init__(
        self,
        mailbox: Mailbox,
        state: HubState,
        journal: Journal,
        pool: PromptPool,
        admission: Admission,
        queue: QueueSettings,
    ) -> None:
        self.mailbox = mailbox
        self.state = state
        self.journal = journal
        self.pool = pool
        self.admission = admission
        self.queue = queue
        self.telemetry = Telemetry()
        self.num_fenced = 0
        self.is_leasing = True
        self._requests: dict[str, LeaseRequest] = {}
        self._granted: dict[str, LeaseGrant] = {}
        self._taker: tuple[str, TakeGroups] | None = None
        self._hand_outs: list[GroupRef] = []
        self._units: set[str] = set()
        self._rules: dict[type, Callable] = {
            LeaseRequest: self._on_lease_request,
            LeaseReturn: self._on_lease_return,
            RowDone: self._on_row_done,
            TakeGroups: self._on_take_groups,
            StepTrained: self._on_step_trained,
            VersionComplete: self._on_version_complete,
            Pulled: self._on_pulled,
            CheckpointWritten: self._on_checkpoint,
            Load: self.telemetry.add,
        }

    def decide(self, event: ev.Event) -> None:
        """Journal an event, then let it take effect."""
        self.journal.append(stamped(event))
        apply(event, self.state)

    def handle(self, letter: Letter) -> bool:
        """Act on a letter; False if this hub has no rule for it."""
        rule = self._rules.get(type(letter.message))
        if rule is None:
            return False
        rule(letter.sender, letter.message)
        self.serve()
        return True

    def serve(self) -> None:
        """Meet the requests that can be met now; handing out comes first, since it makes room."""
        self._hand_out()
        for holder in list(self._requests):
            self._grant(holder)

    def lose(self, holder: str, reason: str) -> None:
        """A rollout died: what it held comes back."""
        self._requests.pop(holder, None)
        self._granted.pop(holder, None)
        self.telemetry.forget(holder)
        strays: list[str] = []
        for group in self._held_by(holder):
            lost = [s for s in group.samples(RowStatus.LEASED) if group.rows[s].holder == holder]
            strays += [RowId(group.id.epoch, group.id.prompt, s).key(group.rows[s].attempt) for s in lost]
            for attempt in sorted({group.rows[s].attempt for s in lost}):
                self.decide(ev.Returned(group=group.id, attempt=attempt, reason=reason))
        for unit in self._units if strays else ():
            # It may have died between writing a row and telling: nobody will ever ask for those bytes.
            self.mailbox.send(unit, DropRows(strays))
        self.serve()

    def holders(self) -> set[str]:
        """Who holds a lease."""
        return {g.rows[sample].holder for g in self.state.queued() for sample in g.samples(RowStatus.LEASED)}

    def _held_by(self, holder: str) -> list[Group]:
        leased = (RowStatus.LEASED,)
        return [g for g in self.state.queued() if any(g.rows[s].holder == holder for s in g.samples(*leased))]

    # ------------------------------------------------------------------------------------------------------- leases

    def _on_lease_request(self, sender: str, request: LeaseRequest) -> None:
        granted = self._granted.get(sender)
        if granted is not None and granted.request == request.request:
            self.mailbox.send(sender, granted)  # the answer was lost or crossed the repeated question
        elif granted is None or request.request > granted.request:
            self._requests[sender] = request

    def _on_lease_return(self, sender: str, message: LeaseReturn) -> None:
        for group_id, attempt in zip(message.groups, message.attempt, strict=True):
            if group_id in self.state.groups:
                self.decide(ev.Returned(group=group_id, attempt=attempt, reason=f"{sender} moved to another version"))

    def _grant(self, holder: str) -> None:
        request = self._requests[holder]
        leases: list[Lease] = []
        while len(leases) < request.num_groups and self.is_leasing:
            lease = self._lease_one(holder, request.version)
            if lease is None:
                break
            leases.append(lease)
        if leases:
            del self._requests[holder]
            self._granted[holder] = LeaseGrant(request.request, request.version, leases)
            self.mailbox.send(holder, self._granted[holder])

    def _lease_one(self, holder: str, version: int) -> Lease | None:
        """Lease one group: first what came back, then the next of the data."""
        state = self.state
        for group_id in state.wanted:
            if self.admission.may_lease(state, version, state.groups[group_id]):
                samples = state.groups[group_id].samples(RowStatus.WANTED)
                attempt = 1 + max(row.attempt for row in state.groups[group_id].rows)
                break
        else:
            if not self.admission.may_lease(state, version):
                return None
            group_id, attempt = self.pool.group_at(state.cursor), 1
            samples = list(range(state.samples_per_prompt))
        self.decide(ev.Leased(group=group_id, samples=samples, attempt=attempt, version=version, holder=holder))
        return Lease(group_id, attempt, samples, self.pool.row(group_id))

    # --------------------------------------------------------------------------------------------------------- rows

    def _on_row_done(self, sender: str, done: RowDone) -> None:
        if done.unit:
            self._units.add(done.unit)
        row = self.state.row(done.row)
        if row is None or row.status is not RowStatus.LEASED or row.attempt != done.attempt:
            self.num_fenced += 1
            if not done.failure:
                self.mailbox.send(done.unit, DropRows([done.row.key(done.attempt)]))
            log.info("row %s attempt %d from %s is fenced off", done.row, done.attempt, sender)
            return
        if done.failure or done.reward is None:
            self.decide(ev.RowFailed(row=done.row, reason=done.failure or "no reward"))
        else:
            self.decide(
                ev.RowReady(
                    row=done.row,
                    unit=done.unit,
                    version=done.version,
                    num_tokens=done.num_tokens,
                    reward=done.reward,
                    num_versions=done.num_versions,
                )
            )
        group = self.state.groups.get(GroupId(done.row.epoch, done.row.prompt))
        if group is not None and group.is_complete and self._has_no_signal(group):
            self._drop([group])
            self.decide(ev.GroupFiltered(group=group.id))

    def _has_no_signal(self, group: Group) -> bool:
        rewards = {group.rows[sample].reward for sample in group.samples(RowStatus.READY)}
        return self.queue.filter_zero_std and len(rewards) == 1

    def _drop(self, groups: list[Group]) -> None:
        """Tell the units to forget the rows of these groups."""
        by_unit: dict[str, list[str]] = {}
        for group in groups:
            for sample in group.samples(RowStatus.READY):
                row = group.rows[sample]
                key = RowId(group.id.epoch, group.id.prompt, sample).key(row.attempt)
                by_unit.setdefault(row.unit, []).append(key)
        for unit, keys in by_unit.items():
            self.mailbox.send(unit, DropRows(keys))

    # ----------------------------------------------------------------------------------------------------- training

    def _on_take_groups(self, sender: str, request: TakeGroups) -> None:
        if request.step == self.state.step:
            self._taker = (sender, request)

    def _hand_out(self) -> None:
        if self._taker is None:
            return
        sender, request = self._taker
        fresh: list[Group] = []
        while (group := self.admission.next_ready(self.state)) is not None:
            self.decide(ev.Handed(step=request.step, groups=[group.id]))
            fresh.append(group)
        self._hand_outs += [_reference(group) for group in fresh]
        if len(self._hand_outs) > request.received:
            groups, metrics = self._hand_outs[request.received :], self.telemetry.metrics(self.state)
            self.mailbox.send(sender, HandOut(request.step, request.received, self.admission.per_step, groups, metrics))
            self._taker = None

    def _on_step_trained(self, sender: str, message: StepTrained) -> None:
        if message.step == self.state.step:
            self._drop([self.state.groups[group_id] for group_id in self.state.handed])
            self.decide(ev.Trained(step=message.step))
            self._hand_outs.clear()

    def _on_version_complete(self, sender: str, message: VersionComplete) -> None:
        relay = sender.partition("/")[0]
        self._units.add(relay)
        self.decide(ev.Published(version=message.version, step=message.step, digest=message.digest, relay=relay))

    def _on_pulled(self, sender: str, message: Pulled) -> None:
        self.decide(ev.Received(version=message.version, digest=message.digest, holder=sender))

    def _on_checkpoint(self, sender: str, message: CheckpointWritten) -> None:
        self.decide(ev.Checkpointed(step=message.step, path=message.path))


def _reference(group: Group) -> GroupRef:
    samples = group.samples(RowStatus.READY)
    rows = [group.rows[sample] for sample in samples]
    return GroupRef(
        group=group.id,
        samples=samples,
        attempts=[row.attempt for row in rows],
        units=[row.unit for row in rows],
        versions=[row.version for row in rows],
        num_tokens=[row.num_tokens for row in rows],
        rewards=[row.reward for row in rows],
    )
