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


class MemberStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process of the run: its name and host, the incarnation, the rows that are leased to it, and what it does.

    One that has not joined yet has incarnation 0.
    """

    name: str
    host: str
    incarnation: int
    leased: int
    state: str = ""
    """What it does, such as `generates`."""
    seconds: float = 0.0
    """For how long it has done so."""
    version: int = -1
    """Of its weights; -1 if it has none, or none is known."""
    tokens_per_s: float | None = None
    """Tokens that a rollout draws in a second; None for other roles, and where no report says it."""


class WaitStatus(msgspec.Struct, frozen=True):
    """One process waits for others, and for what, for so many seconds."""

    who: str
    whom: str
    what: str
    seconds: float


class StatusReport(Message, frozen=True):
    """From the hub: how far the run is, what each process does, and who waits for whom."""

    step: int
    """The number of trained steps."""
    version: int
    """The newest version, -1 before the first."""
    members: list[MemberStatus]
    account: dict[str, int | bool]
    """That of the rows."""
    alarm: str = ""
    """The last one, if any."""
    num_steps: int = 0
    elapsed_s: float = 0.0
    """Since this start of the run."""
    left_s: float | None = None
    """Until its last step; None before the second step of this start."""
    step_s: float = 0.0
    """Seconds of the last step; 0 before the first of this start."""
    reward: float | None = None
    """The mean of the last step; None before the first of this start."""
    queue: dict[str, int] = msgspec.field(default_factory=dict)
    """Groups: `step` of a whole step, of which the trainer has `in_training`; `ready` for it, `begun` but not complete, and `window`, the
    most that may be ready or begun."""
    evaluation: int = 0
    """Samples of an evaluation under way that are not scored yet."""
    waits: list[WaitStatus] = msgspec.field(default_factory=list)
    ending: str = ""
    """How the run is being ended, if it is."""


class TrainerState(Message, frozen=True):
    """To the hub: what the trainer does now, such as `trains` or `waits`, for the status alone. Sent at each change."""

    state: str


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
