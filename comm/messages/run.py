"""Messages about the run as a whole: its steps, its end and its failures."""

import msgspec

from .base import Message


class TrainerStarted(Message, frozen=True):
    """To the hub: rank 0 of the trainer has restarted as this incarnation. Repeated until `RestartPoint` answers it."""

    incarnation: int


class RestartPoint(Message, frozen=True):
    """The hub's answer to `TrainerStarted`: the run has trained `step` optimizer steps.

    Earlier incarnations died `num_memory_deaths` times because the memory of a GPU was full.
    """

    incarnation: int
    step: int
    num_memory_deaths: int = 0


class ActorFailed(Message, frozen=True):
    """To the hub: a rank of the trainer failed with this error; its supervisor restarts it."""

    error: str
    is_memory_full: bool = False
    """The memory of its GPU did not suffice."""


class StepTrained(Message, frozen=True):
    """To the hub: the trainer has applied optimizer step `step` to the groups that it got for the step.

    It worked and waited for groups for so many seconds since the step before; both are 0 where that is not known.
    """

    step: int
    incarnation: int = 1
    """Incarnation of rank 0; the hub ignores a message of an earlier incarnation than it knows."""
    busy_s: float = 0.0
    waited_s: float = 0.0


class LearningAlarm(Message, frozen=True):
    """To the hub: the metrics of a step show what goes wrong, such as a collapse to come; `text` names the cause and the setting to change."""

    text: str
    ends_run: bool = False
    """The trainer stops here, as `run.on_collapse=stop` asks."""


class CheckpointWritten(Message, frozen=True):
    """To the hub: the checkpoint after `step` optimizer steps is complete; training may have advanced since."""

    step: int
    path: str


class DrainRequested(Message, frozen=True):
    """To the hub: rollout `member` gets no more leases, and is stopped once it holds none."""

    member: str


class StatusRequested(Message, frozen=True):
    """To the hub: send the status of the run to the inbox `reply_to`."""

    reply_to: str


class MemberStatus(msgspec.Struct, frozen=True):
    """A living process: its name and host, the incarnation, and the rows that are leased to it."""

    name: str
    host: str
    incarnation: int
    leased: int


class StatusReport(Message, frozen=True):
    """From the hub: the number of trained steps, the newest version, the members, the account of the rows, and the last alarm, if any."""

    step: int
    version: int
    members: list[MemberStatus]
    account: dict[str, int | bool]
    alarm: str = ""


class CheckpointRequested(Message, frozen=True):
    """To the hub: a process received the signal to write a checkpoint soon; the run continues."""


class TrainingDone(Message, frozen=True):
    """To the hub: the trainer has ended; `facts` are for the summary."""

    facts: dict[str, float | int | str | list[str]]


class Stop(Message, frozen=True):
    """From the hub: the run ends; the process reports the rows that it holds and leaves."""

    reason: str


class DeclaredDead(Message, frozen=True):
    """From the hub: this incarnation of the process was declared dead while it was silent, and must make room for the next one."""

    incarnation: int


class Failed(Message, frozen=True):
    """To the hub: the process met an error that ends the run, or its supervisor gives it up; `exit_code` 2 is a user's mistake."""

    error: str
    exit_code: int


class Interrupted(Message, frozen=True):
    """To the hub: the process received a signal to end the run."""

    signal: int


class BusyReport(Message, frozen=True):
    """A relay's report to the hub, about once a second: seconds since it started that it was busy and idle."""

    busy_s: float
    idle_s: float
