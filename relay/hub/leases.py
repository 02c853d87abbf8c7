"""The hub's office for leases: rollouts ask for groups, and get what admission allows."""

from ...comm.messages import Lease, LeaseGrant, LeaseRequest, LeaseReturn
from ..dataset import PromptPool
from ..journal import events as ev
from ..journal.state import Group, RowStatus
from ..queue.admission import Admission
from .context import HubContext, Routes


class Leases:
    """Open requests, the last grant of each holder, and who may start what."""

    def __init__(self, context: HubContext, pool: PromptPool, admission: Admission) -> None:
        self.context = context
        self.pool = pool
        self.admission = admission
        self.is_open = True
        self._requests: dict[str, LeaseRequest] = {}
        self._granted: dict[str, LeaseGrant] = {}
        self.routes: Routes = {LeaseRequest: self._on_request, LeaseReturn: self._on_return}

    def advance(self) -> None:
        """Grant what may be granted now."""
        refused: set[int] = set()  # a version that gets nothing gets nothing until the next letter
        for holder, request in list(self._requests.items()) if self.is_open else ():
            if request.version not in refused and not self._grant(holder):
                refused.add(request.version)

    def on_process_death(self, process: str, reason: str) -> None:
        """What the holder had leased comes back."""
        self._requests.pop(process, None)
        self._granted.pop(process, None)
        lost: list[tuple[Group, int]] = []
        for group in self._held_by(process):
            samples = [s for s in group.samples(RowStatus.LEASED) if group.rows[s].holder == process]
            lost += [(group, sample) for sample in samples]
            for attempt in sorted({group.rows[s].attempt for s in samples}):
                self.context.commit(ev.Returned(group=group.id, attempt=attempt, reason=reason))
        # It may have died between writing a row and telling: nobody will ever ask for those bytes.
        self.context.drop_rows(lost, everywhere=True)

    def holders(self) -> set[str]:
        """Who holds a lease."""
        groups = self.context.state.queued()
        return {g.rows[sample].holder for g in groups for sample in g.samples(RowStatus.LEASED)}

    def _held_by(self, holder: str) -> list[Group]:
        groups = self.context.state.queued()
        return [g for g in groups if any(g.rows[s].holder == holder for s in g.samples(RowStatus.LEASED))]

    def _on_request(self, sender: str, request: LeaseRequest) -> None:
        granted = self._granted.get(sender)
        if granted is not None and granted.request_id == request.request_id:
            self.context.mailbox.send(sender, granted)  # the answer was lost or crossed the repeated question
        elif granted is None or request.request_id > granted.request_id:
            self._requests[sender] = request

    def _on_return(self, sender: str, message: LeaseReturn) -> None:
        for group, attempt in zip(message.groups, message.attempts, strict=True):
            if group in self.context.state.groups:
                reason = f"{sender} moved to another version"
                self.context.commit(ev.Returned(group=group, attempt=attempt, reason=reason))

    def _grant(self, holder: str) -> bool:
        """Lease what may be leased; says whether that is as many groups as the holder asked for."""
        request = self._requests[holder]
        leases: list[Lease] = []
        while len(leases) < request.num_groups:
            lease = self._lease_one(holder, request.version)
            if lease is None:
                break
            leases.append(lease)
        if leases:
            del self._requests[holder]
            self._granted[holder] = LeaseGrant(request.request_id, request.version, leases)
            self.context.mailbox.send(holder, self._granted[holder])
        return len(leases) == request.num_groups

    def _lease_one(self, holder: str, version: int) -> Lease | None:
        """Lease one group: first what came back, then the next of the data."""
        state = self.context.state
        for group_id in state.unassigned:
            if self.admission.may_lease(state, version, state.groups[group_id]):
                group = state.groups[group_id]
                samples, attempt = group.samples(RowStatus.WANTED), group.next_attempt
                break
        else:
            if not self.admission.may_lease(state, version):
                return None
            group_id, attempt = self.pool.group_at(state.cursor), 1
            samples = list(range(state.samples_per_prompt))
        self.context.commit(ev.Leased(group=group_id, samples=samples, attempt=attempt, version=version, holder=holder))
        return Lease(group_id, attempt, samples, self.pool.row(group_id))
