"""Faults of a simulated run: a plan is a list of them, each at a moment, on a target.

A target is a number: of the processes of a role that live at that moment, it names one (modulo their count), so that a plan has a
meaning for any run, and a shorter plan is one too.
"""

from typing import TYPE_CHECKING, Literal

import msgspec

from headrace.comm.messages import DrainRequested
from headrace.comm.messages.base import role_of

if TYPE_CHECKING:
    from .simulation import FaultyRun

Kind = Literal[
    "kill", "freeze", "kill at event", "kill at message", "slow", "repeat", "partition", "drain", "join", "full disk",
    "clock jump", "corrupt bytes", "two deaths", "cut off", "interrupt",
]  # fmt: skip
TARGETS: dict[Kind, tuple[str, ...]] = {
    "kill": ("hub", "actor", "rollout", "relay", "reference"),
    "freeze": ("hub", "actor", "rollout", "relay", "reference"),
    "kill at event": ("hub",),
    "kill at message": ("hub", "actor", "rollout", "relay", "reference"),
    "slow": ("hub", "actor", "rollout", "relay", "reference"),
    "repeat": ("actor", "rollout", "relay", "reference"),
    "partition": ("rollout", "relay", "reference"),
    "drain": ("rollout",),
    "join": ("rollout",),
    "full disk": ("hub",),
    "clock jump": ("hub",),
    "corrupt bytes": ("relay",),
    "two deaths": ("hub",),
    "cut off": ("run",),
    "interrupt": ("run",),
}


MESSAGES: dict[str, tuple[str, ...]] = {
    "hub": ("", "LeaseGrant", "TrainBatch", "DropRows", "ClaimResult", "RestartPoint", "Stop"),
    "actor": ("", "StepTrained", "CheckpointWritten", "TrainingDone"),
    "rollout": (
        "",
        "RowDone",
        "RowsStreamed",
        "TransferOffered",
        "ClaimRows",
        "MigrateResult",
        "HeldRows",
        "SampleScored",
    ),
    "relay": ("", "StoredRows", "VersionReady", "QueueSaved", "QueueRestored"),
    "reference": ("", "RequestRows", "ColumnsAdded", "RowsNotFound"),
}
"""Messages before which a process of a role is killed; "" is any."""
EVENTS = ("", "Leased", "Moved", "RowReady", "Handed", "Trained", "Checkpointed", "TrainerRestarted", "Ending")
"""Events before which the hub is killed; "" is any."""
PAIRS: tuple[tuple[str, str, str], ...] = (
    ("hub", "Trained", "actor"), ("actor", "StepTrained", "relay"), ("actor", "StepTrained", "hub"), ("hub", "Handed", "relay"),
)  # fmt: skip
"""Two deaths: a role, the event or message before which it dies, and the role that dies soon after, all of its processes."""


class PlannedFault(msgspec.Struct, frozen=True, kw_only=True):
    """Something that goes wrong `at` a moment, for `seconds`; `number` chooses the target, and `count` events or messages of a kind."""

    at: float
    kind: Kind
    role: str
    number: int = 0
    seconds: float = 0.5
    count: int = 0
    before: str = ""
    """The kind of the message or event before which a process is killed; any if it is empty."""
    is_noticed: bool = True
    """Whether a relay notices at once that a process has died; whether a hub dies after the event has been written, not before."""

    def apply(self, run: "FaultyRun") -> bool:
        """Let it happen; False if there is nothing that it could happen to."""
        name = self._target(run)
        if name is None:
            return False
        happens = _RULES[self.kind](self, run, name)
        run.applied[f"{self.kind}: {self.role}"] += happens
        return happens

    def _target(self, run: "FaultyRun") -> str | None:
        if self.role == "run":
            return "" if run.is_running else None
        living = [name for name, life in run.cluster.lives.items() if role_of(name) == self.role and not life.is_dead]
        return living[self.number % len(living)] if living and run.is_running else None


def _kill(fault: PlannedFault, run: "FaultyRun", name: str) -> bool:
    run.kill(name, is_noticed=fault.is_noticed, down_s=fault.seconds)
    return True


def _freeze(fault: PlannedFault, run: "FaultyRun", name: str) -> bool:
    life, cluster = run.cluster.lives[name], run.cluster
    life.frozen_until = run.world.now + fault.seconds
    cluster.expire(life)
    run.world.at(life.frozen_until, lambda: cluster.revive(life))
    return True


def _kill_at_event(fault: PlannedFault, run: "FaultyRun", name: str) -> bool:
    run.checks.events_left = fault.before, fault.count, fault.is_noticed
    return True


def _kill_at_message(fault: PlannedFault, run: "FaultyRun", name: str) -> bool:
    run.cluster.mailboxes.left[name] = fault.before, fault.count
    return True


def _slow(fault: PlannedFault, run: "FaultyRun", name: str) -> bool:
    run.cluster.mailboxes.slow[name] = (0.1 * (1 + fault.count), run.world.now + fault.seconds)
    return True


def _repeat(fault: PlannedFault, run: "FaultyRun", name: str) -> bool:
    run.cluster.mailboxes.twice_until[name] = run.world.now + fault.seconds
    return True


def _partition(fault: PlannedFault, run: "FaultyRun", name: str) -> bool:
    life, cluster = run.cluster.lives[name], run.cluster
    cluster.silent_until[name] = run.world.now + fault.seconds
    cluster.expire(life)
    run.world.at(cluster.silent_until[name], lambda: cluster.revive(life))
    return True


def _drain(fault: PlannedFault, run: "FaultyRun", name: str) -> bool:
    rollouts = {member.name for member in run.cluster.members.values() if member.role == "rollout"}
    if name in run.drained or len(rollouts - run.drained) < 2:
        return False
    run.drained.add(name)
    run.cluster.mailboxes.open("ctl").send("hub", DrainRequested(name))
    return True


def _join(fault: PlannedFault, run: "FaultyRun", name: str) -> bool:
    run.add_rollout()
    return True


def _fill_disk(fault: PlannedFault, run: "FaultyRun", name: str) -> bool:
    if run.hub is None:
        return False
    run.hub.context.journal.full = "no room on the disk"
    return True


def _jump(fault: PlannedFault, run: "FaultyRun", name: str) -> bool:
    run.clock.wall_error += (fault.count - 4) * 1000.0
    return True


def _corrupt(fault: PlannedFault, run: "FaultyRun", name: str) -> bool:
    unit = next((unit for unit in run.cluster.units.values() if unit.process is run.cluster.lives[name]), None)
    keys = sorted(unit.rows) if unit is not None else []
    if unit is None or not keys:
        return False
    unit.spoilt.add(keys[fault.count % len(keys)])
    return True


def _kill_two(fault: PlannedFault, run: "FaultyRun", name: str) -> bool:
    """One process before it writes or says something, and then those that it would have told, or that have what it needs."""
    first, before, second = PAIRS[fault.number % len(PAIRS)]
    if first == "hub":
        run.checks.events_left = before, 0, fault.is_noticed
    else:
        run.cluster.mailboxes.left[f"{first}-0"] = before, 0
    run.watched = (first, second)
    return True


def _cut_off(fault: PlannedFault, run: "FaultyRun", name: str) -> bool:
    run.cut_off()
    return True


def _interrupt(fault: PlannedFault, run: "FaultyRun", name: str) -> bool:
    run.interrupt()
    return True


_RULES = {
    "kill": _kill, "freeze": _freeze, "kill at event": _kill_at_event, "kill at message": _kill_at_message, "slow": _slow,
    "repeat": _repeat, "partition": _partition, "drain": _drain, "join": _join, "full disk": _fill_disk, "clock jump": _jump,
    "corrupt bytes": _corrupt, "two deaths": _kill_two, "cut off": _cut_off, "interrupt": _interrupt,
}  # fmt: skip
