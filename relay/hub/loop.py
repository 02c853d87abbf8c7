"""The hub's process: owns the journal, watches the fleet, ends the run.

A hub whose process was started again continues where the journal ends: leases and batches stay with their holders, and the
other processes send again what the hub before did not handle.

Consumes its mailbox and waits for messages alone, at most `WATCH_S`; any process may wake it. A process is dead when its supervisor
reports its exit, when a relay reports that its connection ended or, at the latest, when its heartbeat stops or another incarnation
has joined: its leases come back, and the rows that it stored are read elsewhere or generated again.
"""

import logging
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from ...comm import threads
from ...comm.clock import Clock
from ...comm.disk import DiskReserve, say
from ...comm.errors import SettingError
from ...comm.fleet import Fleet, Member
from ...comm.messages import (
    ConnectionLost,
    DeclaredDead,
    Failed,
    HeldRows,
    Interrupted,
    ListStoredRows,
    MemberStatus,
    StatusReport,
    StatusRequested,
    StoredRows,
    TrainingDone,
)
from ...comm.messages.base import storage_id_of
from ...comm.recipe import Recipe
from ..journal import events as ev
from ..journal.journal import Journal, account_dict, last_opened, replay
from ..journal.records import RowStatus
from ..journal.state import HubState, apply
from ..queue.admission import Admission
from ..queue.batch import TRAIN
from ..queue.evaluation_prompts import open_evaluation
from ..queue.schedules import schedule_of
from ..queue.tasks import open_sampler, pipeline
from .exits import ProcessExit, take_exits
from .health import PATIENCE_S
from .hub import Hub
from .model_check import ModelCheck
from .prompts import open_curriculum, open_prompts
from .shutdown import RunEnd, Shutdown, names_by_host, write_summary

log = logging.getLogger(__name__)

WATCHED = ("rollout", "relay", "reference", "task")
WATCH_S = 0.2
SHUTDOWN_DEADLINE_S = 15.0  # below the 20 s after which a supervisor kills its child


def run(
    fleet: Fleet, recipe: Recipe, clock: Clock | None = None, on_open: Callable[[Hub], None] = lambda _: None
) -> None:
    """The hub's process, from the first message to the summary; `on_open` is called with the hub before that message."""
    hub = open_hub(fleet, recipe, clock or Clock(recipe.emulated.speed))
    on_open(hub)
    loop = HubLoop(hub, fleet)
    if hub.state.hub_restarts:
        loop.recover()
    elif hub.state.checkpointed >= 0:
        hub.saved_queue.restore()
    while (end := loop.step()) is None:
        pass
    ended = Shutdown(hub, fleet, SHUTDOWN_DEADLINE_S, recipe.checkpoint.grace_s).run(end)
    write_summary(Path(recipe.run.dir), ended | {"hosts": names_by_host(loop.seen.values())})
    hub.context.journal.close()
    hub.mailbox.close()


def open_hub(fleet: Fleet, recipe: Recipe, clock: Clock) -> Hub:
    """The hub of a recipe, with its inbox, and its journal in the run folder."""
    queue, tasks = recipe.queue, pipeline(recipe.queue, recipe.algorithm)
    mailbox = fleet.open_mailbox("hub")
    pool = open_prompts(recipe)
    check_journal_is_there(Path(recipe.run.dir), fleet.incarnation)
    state, journal = open_journal(Path(recipe.run.dir), recipe, tasks[TRAIN].needs, fleet.run_id, clock, pool.sizes)
    schedule, sampler = schedule_of(recipe), open_sampler(queue.sampler)
    calls_s = (recipe.comm.deadline_s, recipe.reward.timeout_s, recipe.environment.timeout_s)
    micro_tokens = recipe.optimizer.micro_batch * recipe.roles.actor
    admission = Admission(recipe.batch, queue, recipe.run.steps, schedule, sampler, micro_tokens)
    return Hub(
        mailbox, state, journal, pool, admission, queue, recipe.repack, clock.now, tasks, clock.wall,
        evaluation=open_evaluation(recipe), curriculum=open_curriculum(recipe), speed=clock.speed,
        patience_s=max(PATIENCE_S, 4 * max(calls_s)),
    )  # fmt: skip


class HubLoop:
    """Handles one message after the other, and checks the fleet at intervals."""

    def __init__(self, hub: Hub, fleet: Fleet) -> None:
        self.hub = hub
        self.fleet = fleet
        self._run_dir = hub.context.journal.path.parent
        self._known: dict[str, Member] = {}
        self.seen: dict[str, Member] = {}
        """The last member that was seen under each name."""
        self._lost: dict[str, int] = {}
        self._replaced: set[str] = set()
        self._printed = {""}
        self._models = ModelCheck()
        self._broken: ProcessExit | None = None
        """The exit of a process that is not started again."""
        self._checked_at = 0.0

    def step(self) -> RunEnd | None:
        """Handle at most one message; returns how the run ends, or None while it continues."""
        if failure := self.hub.context.journal.full or self.hub.context.failure:
            return RunEnd("failed", failure, 1)
        if (ending := self.hub.state.ending) is not None:  # the hub before began to end the run
            return RunEnd.of(ending)
        if self._broken is not None:
            return RunEnd("failed", self._broken.how, 1, gone=self._broken.name)
        envelope = self.hub.mailbox.receive(WATCH_S)
        message = envelope.message if envelope else None
        # A short run is over before the first check is due.
        is_last = isinstance(message, TrainingDone | Failed | Interrupted)
        if is_last or threads.seconds() - self._checked_at >= WATCH_S:
            self._check_fleet()
        if envelope is None or (self._broken is not None and isinstance(message, Failed | Interrupted)):
            return None  # a broken process is the cause of the message; the next step tells it
        match message:
            case TrainingDone():
                return RunEnd("finished", done=message, gone=envelope.sender)
            case Failed(error=error, exit_code=exit_code):
                return RunEnd("failed", error, exit_code, gone=envelope.sender)
            case Interrupted(signal=number):
                return RunEnd("interrupted", f"ended by {signal.Signals(number).name}", 128 + number)
            case ConnectionLost(member=name, incarnation=incarnation):
                self._on_connection_lost(name, incarnation)
            case HeldRows():
                pass  # the rollout was drained, so it holds none
            case StatusRequested(reply_to=inbox):
                self.hub.mailbox.send(inbox, self._status())
            case StoredRows(keys=keys):
                self.hub.results.drop_needless(envelope.sender, keys)
            case _ if not self.hub.handle(envelope):
                log.warning("the hub has no route for %s from %s; dropped", type(message).__name__, envelope.sender)
            case _:
                pass
        return None

    def _status(self) -> StatusReport:
        state = self.hub.state
        leased = Counter(row.holder for _, row in state.leased())
        members = [
            MemberStatus(member.name, member.host_name, member.incarnation, leased[member.name])
            for member in self.fleet.members()
            if member.is_alive
        ]
        return StatusReport(state.step, state.version, members, account_dict(state))

    def recover(self) -> None:
        """Catch up with the deaths of processes and storage units since the hub before stopped.

        The hub before may have died before it sent its last decisions: grants are repeated, and the rows that units hold without
        need are dropped.
        """
        state, living = self.hub.state, {member.name: member for member in self.fleet.members() if member.is_alive}
        self.hub.context.relays |= {relay.name for relay in self.fleet.alive_members("relay")}
        stored = {unit for _, row in state.rows(RowStatus.READY) for unit in row.storage_ids}
        present = {storage_id_of(relay.name, relay.incarnation) for relay in self.fleet.alive_members("relay")}
        for unit in sorted(stored - present):
            self.hub.on_storage_lost(unit, "gone while the hub was started again")
        for holder in sorted(self.hub.leases.holders()):
            if holder not in living or living[holder].incarnation != state.incarnations[holder]:
                self.hub.on_process_death(holder, "gone while the hub was started again")
        for record in state.tasks.values():
            for consumer in {batch.consumer for batch in record.open_batches.values()} - living.keys():
                self.hub.on_process_death(consumer, "gone while the hub was started again")
        if state.ending is None:
            if state.checkpointed >= 0 and not state.grants:  # the hub before may not have had the saved queue yet
                self.hub.saved_queue.restore()
            self.hub.leases.repeat_grants()
            for relay in self.fleet.alive_members("relay"):
                self.hub.mailbox.send(relay.name, ListStoredRows())

    def _check_fleet(self) -> None:
        self._checked_at = threads.seconds()
        self.seen |= {member.name: member for member in self.fleet.members()}
        living = {member.name: member for role in WATCHED for member in self.fleet.alive_members(role)}
        for name, known in list(self._known.items()):
            now = living.get(name)
            if now is None or now.incarnation != known.incarnation:
                if now is None or self._lost.get(name) != known.incarnation:
                    self._on_death(known, f"incarnation {known.incarnation} is gone")
                del self._known[name]
        self._known |= living
        for relay in self.fleet.alive_members("relay"):
            self._replace_if_lost(relay)
        for exit_ in take_exits(self._run_dir):
            self._on_exit(exit_)
        self._print_generators()
        self._check_models()
        self.hub.health.watch(has_rollouts=any(member.role == "rollout" for member in living.values()))

    def _replace_if_lost(self, relay: Member) -> None:
        """Have a relay that was silent, and is back, start again: the rows of its storage unit are given up already."""
        unit = storage_id_of(relay.name, relay.incarnation)
        if unit in self.hub.state.lost_storage_ids and unit not in self._replaced:
            self._replaced.add(unit)
            self.hub.mailbox.send(relay.name, DeclaredDead(relay.incarnation))

    def _print_generators(self) -> None:
        """Print each new description of a rollout's generator: of all logs, only the hub's and rank 0's reach the console."""
        for member in self._known.values():
            description = member.info.get("generator", "")
            if description not in self._printed:
                self._printed.add(description)
                say(f"generator: {description}")

    def _check_models(self) -> None:
        """A process with another policy ends the run; one of a host that has joined is refused alone."""
        for member, reason, ends_run in self._models.differences([*self.seen.values()]):
            if ends_run:
                self.hub.context.failure = reason
            else:
                say(f"{member.name} is refused: {reason}")
                self.hub.on_process_death(member.name, "refused")
                self.hub.leases.stop(member.name)

    def _on_connection_lost(self, name: str, incarnation: int) -> None:
        """Act on the first report about a process that is still in the fleet.

        `_check_fleet` does nothing when the next incarnation joins, since that may hold leases already. It acts again when the
        heartbeat stops: the report may be in error, and then the process continues to work.
        """
        self._check_fleet()
        if (known := self._known.get(name)) is not None and known.incarnation == incarnation:
            self._on_early_death(known, f"the connection of incarnation {incarnation} ended")

    def _on_exit(self, exit_: ProcessExit) -> None:
        """Act on a supervisor's report, of a process that is still in the fleet or that ends the run."""
        if exit_.ends_run:
            self._broken = exit_
        if (known := self._known.get(exit_.name)) is not None and known.pid == exit_.pid:
            self._on_early_death(known, exit_.how)

    def _on_early_death(self, dead: Member, reason: str) -> None:
        if self._lost.get(dead.name) != dead.incarnation:
            self._lost[dead.name] = dead.incarnation
            self._on_death(dead, reason)

    def _on_death(self, dead: Member, reason: str) -> None:
        if dead.role == "relay":
            self.hub.on_storage_lost(storage_id_of(dead.name, dead.incarnation), reason)
        self.hub.on_process_death(dead.name, reason)


def check_journal_is_there(run_dir: Path, incarnation: int) -> None:
    """Raise `SettingError` if the hub is started again and its journal is gone: an empty one would be another run's beginning.

    The reserve beside it says that it was there.
    """
    if incarnation > 1 and (run_dir / DiskReserve.NAME).exists() and not (run_dir / "journal.jsonl").exists():
        raise SettingError(
            f"run.dir: {run_dir / 'journal.jsonl'} was removed while the run was under way; the run cannot continue"
        )


def open_journal(
    run_dir: Path, recipe: Recipe, needs: Iterable[str], run_id: str, clock: Clock, num_rows: tuple[int, ...] = ()
) -> tuple[HubState, Journal]:
    """The journal of a run folder, and the state after its last event.

    It is new, or continued at its end: by the next process of the same run's hub, or by a run that is resumed. The launcher has cut that
    one's journal where the run continues.
    needs: the columns that training needs besides those of the rollout. num_rows: those of each set of the data.
    """
    path = run_dir / "journal.jsonl"
    deadline_s = recipe.comm.deadline_s / 2  # the other processes wait for the hub while it waits for room
    samples = recipe.batch.samples_per_prompt
    opened = ev.Opened(
        epoch=1, samples_per_prompt=samples, run_id=run_id, needs=tuple(sorted(needs)), num_rows=num_rows
    )
    before = last_opened(path)
    if before is not None and before.run_id == run_id:
        _check_same_data(before, opened, recipe)
        journal, state = Journal(path, deadline_s, DiskReserve(run_dir)), replay(path)
        _commit(ev.HubRestarted(), state, journal, clock)
        return state, journal
    if path.exists():
        if recipe.run.resume != "auto":
            raise SettingError(
                f"run.dir: {run_dir} holds a run; set run.resume=auto to continue it, or another run.dir"
            )
        if before is not None:
            _check_same_data(before, opened, recipe)
        journal, state = Journal(path, deadline_s, DiskReserve(run_dir)), replay(path)
        _commit(msgspec.structs.replace(opened, epoch=state.epoch + 1), state, journal, clock)
        return state, journal
    journal, state = Journal(path, deadline_s, DiskReserve(run_dir)), HubState()
    _commit(opened, state, journal, clock)
    return state, journal


def _check_same_data(before: ev.Opened, opened: ev.Opened, recipe: Recipe) -> None:
    """Raise `SettingError` for groups of another size, or a set of data with more or fewer rows: its order follows from them."""
    if before.samples_per_prompt != opened.samples_per_prompt:
        raise SettingError(
            f"batch.samples_per_prompt: the run in {recipe.run.dir} began with {before.samples_per_prompt}"
        )
    if before.num_rows and len(before.num_rows) != len(opened.num_rows):
        raise SettingError(f"data.path: the run in {recipe.run.dir} began with {len(before.num_rows)} sets")
    for path, had, has in zip(recipe.data.paths, before.num_rows, opened.num_rows, strict=False):
        if had != has:
            raise SettingError(
                f"data.path: {path} has {has} rows, and the run in {recipe.run.dir} began with {had}; mend rows in their"
                " places, or set another run.dir"
            )


def _commit(event: ev.Event, state: HubState, journal: Journal, clock: Clock) -> None:
    stamped = ev.stamped(event, clock.wall())
    journal.append(stamped)
    apply(stamped, state)
