"""What the hub can say of a run at a moment: what each process does, and who waits for whom.

`headrace status` and the console of a run read the same report. It is made from the hub's state, the members of the fleet and the last
reports of the processes; nothing is stored, so a hub that is started again knows it after a second.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...comm.clock import TimeLeft, elapsed_s
from ...comm.fleet import Member
from ...comm.mailbox import Envelope
from ...comm.messages import (
    BusyReport,
    ColumnsAdded,
    LoadReport,
    MemberStatus,
    RequestRows,
    StatusReport,
    StepTrained,
    TrainerState,
    WaitStatus,
)
from ...comm.messages.base import process_of, role_of
from ...comm.recipe import Recipe
from ..journal.hub_state import HubState, account_dict
from ..journal.records import RowStatus

if TYPE_CHECKING:
    from .hub import Hub

SILENT_S = 5.0
"""Seconds without a report after which a process counts as silent; those that report do so about once a second."""
_RATE_S = 10.0
"""Seconds of the reports from which the rate of a rollout is computed."""
_BURST_S = 0.2
"""Reports closer than that have waited for the hub, such as for the next one: the last of them counts."""
_BUSY_S = 0.1
"""Seconds of decoding between two reports from which on a rollout counts as generating."""
_LEAST_WAIT_S = 2.0
"""Shorter waits are not told."""
_MOST_NAMES = 4
ABSENT = "starts"
"""The state of a process that has not joined."""
GONE = "gone"
"""That of one that has died, or counts as dead, until its next process joins."""
LEFT = "has ended"
"""That of one that is no longer there while the run ends."""
_SILENT = {"hub": "decides", "front": "serves"}
"""The state of the processes that report nothing about themselves."""
LOADS = "loads"
"""That of one that has joined and has not reported yet."""


@dataclass(slots=True)
class _Seen:
    """What one process reported last."""

    at: float
    state: str = LOADS
    since: float = 0.0
    version: int = -1
    busy_s: float = 0.0
    tokens: deque[tuple[float, int]] = field(default_factory=deque)
    """Time and total of the last reports, for the rate."""

    def enter(self, state: str, now: float) -> None:
        if state != self.state:
            self.state = state
            self.since = now

    def count(self, tokens: int, now: float) -> None:
        """Note a total; that of a new process begins at 0."""
        if self.tokens and tokens < self.tokens[-1][1]:
            self.tokens.clear()
        if self.tokens and now - self.tokens[-1][0] < _BURST_S:
            now = self.tokens.pop()[0]
        self.tokens.append((now, tokens))
        while now - self.tokens[0][0] > _RATE_S:
            self.tokens.popleft()

    @property
    def rate(self) -> float | None:
        first, last = self.tokens[0], self.tokens[-1]
        return (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else None


class Overview:
    """Listens to the messages to the hub, and answers with the status of the run."""

    def __init__(self, hub: "Hub", expected: Sequence[str], seconds: Callable[[], float]) -> None:
        """expected: the processes of the run's recipe, in the order in which they are shown. seconds: a clock."""
        self._hub = hub
        self._seconds = seconds
        self._names = expected
        self._seen: dict[str, _Seen] = {}
        self._time_left = TimeLeft(hub.leases.admission.num_steps)
        self._left_s: float | None = None
        self._step_at = 0.0
        self._step_s = 0.0
        self._reward: float | None = None
        self._began = seconds()
        self._gone_at: dict[str, float] = {}
        """When each process that died did so."""
        self._incarnations: dict[str, int] = {}
        """Of each process that is alive."""

    def observe(self, envelope: Envelope) -> None:
        """Note a message before the hub handles it."""
        process = process_of(envelope.sender)
        now = self._seconds()
        match envelope.message:
            case LoadReport() as load:
                seen = self._of(process, now)
                seen.version = load.version
                seen.count(load.tokens, now)
                seen.enter(_work_of(load, has_worked=load.busy_s - seen.busy_s > _BUSY_S), now)
                seen.busy_s = load.busy_s
            case BusyReport():
                self._of(process, now).enter("serves", now)
            case TrainerState(state=state):
                self._of(process, now).enter(state, now)
            case RequestRows() if role_of(process) != "actor":
                self._of(process, now).enter("waits", now)
            case ColumnsAdded():
                self._of(process, now).enter("works", now)
            case StepTrained(step=step) if step == self._hub.state.step:
                self._end_step(step, now)
            case _:
                pass

    def look(self, members: Iterable[Member]) -> None:
        """Forget the processes that have died or left since the last look; the next one of a name begins anew."""
        living = {member.name: member.incarnation for member in members if member.is_alive}
        for name, incarnation in self._incarnations.items():
            if living.get(name) != incarnation:
                self._seen.pop(name, None)
                self._gone_at[name] = self._seconds()
        self._incarnations = living

    def report(self, members: Sequence[Member]) -> StatusReport:
        """The status of now; `members` are those of the fleet."""
        state = self._hub.state
        now = self._seconds()
        admission = self._hub.leases.admission
        ready = len(state.queue.ready)
        queue = {
            "step": admission.per_step,
            "in_training": len(state.in_training),
            "ready": ready,
            "begun": state.num_queued - ready,
            "window": admission.lead(state),
        }
        found = {member.name: member for member in members if member.is_alive and member.role != "shard"}
        works = {b.consumer for record in state.tasks.values() for b in record.open_batches.values()}
        names = [name for name in self._names if name in found or name not in state.drained]
        names += sorted(found.keys() - {*names})
        shown = [self._status(name, found.get(name), now, is_at_task=name in works) for name in names]
        return StatusReport(
            state.step, state.version, shown, account_dict(state), self._hub.context.alarm,
            num_steps=admission.num_steps, elapsed_s=elapsed_s(), left_s=self._left_s, step_s=self._step_s,
            reward=self._reward, queue=queue, evaluation=state.evaluations.open if state.evaluations.groups else 0,
            waits=sorted(self._waits(shown, now), key=lambda wait: -wait.seconds),
            ending=state.ending.status if state.ending else "",
        )  # fmt: skip

    def _of(self, process: str, now: float) -> _Seen:
        seen = self._seen.setdefault(process, _Seen(now, since=now))
        seen.at = now
        return seen

    def _end_step(self, step: int, now: float) -> None:
        if self._step_at:
            self._step_s = now - self._step_at
            self._left_s = self._time_left.after(step, self._step_s)
        self._step_at = now
        groups = [self._hub.state.groups[group_id] for group_id in self._hub.state.in_training]
        rewards = [group.rows[sample].reward for group in groups for sample in group.samples(RowStatus.READY)]
        self._reward = sum(rewards) / len(rewards) if rewards else None

    def _status(self, name: str, member: Member | None, now: float, *, is_at_task: bool = False) -> MemberStatus:
        state = self._hub.state
        if member is None:
            since = self._gone_at.get(name, self._began)
            if state.ending or name in self._incarnations:
                return MemberStatus(name, "", 0, 0, LEFT if state.ending else GONE)
            return MemberStatus(name, "", 0, 0, GONE if name in self._gone_at else ABSENT, now - since)
        # The trainer's first process speaks for all.
        seen = self._seen.get(name) or (self._seen.get("actor-0") if member.role == "actor" else None)
        leased = len(state.held.get(name, ()))
        at = {"name": name, "host": member.host_name, "incarnation": member.incarnation, "leased": leased}
        if member.role in _SILENT:
            return MemberStatus(**at, state=_SILENT[member.role])
        if seen is None and member.role == "actor" and state.hub_restarts and name not in self._gone_at:
            return MemberStatus(
                **at, state="trains", version=state.step
            )  # it tells changes alone, and told the hub before
        if seen is None:
            return MemberStatus(**at, state=LOADS, seconds=now - self._gone_at.get(name, self._began))
        if name.startswith(("rollout-", "relay-")) and now - seen.at > SILENT_S:
            return MemberStatus(**at, state="silent", seconds=now - seen.at, version=seen.version)
        doing, version = "works" if is_at_task else seen.state, seen.version
        if name in state.drained:
            doing = "drains" if leased else "leaves"
        if name.startswith("actor-"):
            version = state.step
        elif name.startswith("relay-"):
            version = state.version
        rate = seen.rate if seen.tokens else None
        return MemberStatus(**at, state=doing, seconds=now - seen.since, version=version, tokens_per_s=rate)

    def _waits(self, members: Sequence[MemberStatus], now: float) -> Iterator[WaitStatus]:
        """Who waits for whom, for more than a moment."""
        for member in members:
            if member.seconds < _LEAST_WAIT_S:
                continue
            if member.state == "silent":
                yield WaitStatus("the run", member.name, f"silent, with {member.leased} trajectories", member.seconds)
            elif member.name == "actor-0" and member.state == "waits":
                whom, what = _trainer_waits_for(self._hub.state, self._hub.context.awaits_queue)
                yield WaitStatus(member.name, whom, what, member.seconds)
            elif member.state == "scores":
                yield WaitStatus(member.name, "its reward functions", f"{member.leased} responses", member.seconds)
            elif member.name.startswith("rollout-") and member.state == "waits":
                yield WaitStatus(member.name, *self._rollout_waits_for(member), member.seconds)
            elif member.state == "waits" and not member.name.startswith("actor-"):
                yield WaitStatus(member.name, "the rollouts", "rows", member.seconds)

    def _rollout_waits_for(self, member: MemberStatus) -> tuple[str, str]:
        """Whom an idle rollout waits for, and for what."""
        state = self._hub.state
        admission = self._hub.leases.admission
        if member.version < 0:
            return "the relay", "the first weights"
        if not admission.remaining_groups(state) - state.num_queued:
            return "nobody", "all prompts of the run are handed out"
        if not admission.free_places(state):
            return (
                "actor-0",
                f"room in the queue, which has {state.num_queued} of at most {admission.lead(state)} groups",
            )
        return "the hub", "prompts"


def expected_names(recipe: Recipe) -> tuple[str, ...]:
    """The processes of a run's recipe, in the order in which they are shown."""
    roles = recipe.roles
    counts = {
        "actor": roles.actor, "relay": roles.relay or 1, "rollout": recipe.num_replicas, "reference": roles.reference,
        "task": roles.task, "front": int(bool(recipe.rollout.serve)),
    }  # fmt: skip
    return ("hub", *(f"{role}-{index}" for role, count in counts.items() for index in range(count)))


def _work_of(load: LoadReport, *, has_worked: bool) -> str:
    """What a rollout does. has_worked: it has decoded since its last report, though it may have nothing to decode just now."""
    if load.num_running + load.num_waiting or has_worked:
        return "generates"
    if load.num_at_tools:
        return "at tools"
    return "scores" if load.num_scoring else "waits"


def _trainer_waits_for(state: HubState, awaits_queue: bool) -> tuple[str, str]:
    """Whom the trainer waits for while it asks for groups, and for what."""
    if awaits_queue:
        return "the relays", "rows of the run before, which are being read"
    if state.held:
        names = sorted(state.held, key=lambda name: -len(state.held[name]))
        more = [f"{len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
        num_leased = sum(map(len, state.held.values()))
        return ", ".join([*names[:_MOST_NAMES], *more]), f"groups ({num_leased} trajectories are there)"
    if state.queue.at_tasks:
        return "the tasks of the queue", f"columns of {len(state.queue.at_tasks)} groups"
    return "the rollouts", "groups, of which none has begun"
