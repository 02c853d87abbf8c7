"""The hub's process: owns the journal, watches the fleet, ends the run.

A hub whose process was started again continues where the journal ends: leases and batches stay with their holders, and the
store delivers again the messages that the previous hub did not confirm.

Consumes its mailbox and waits for messages alone, at most `WATCH_S`; any process may wake it. When a process dies
(`failure_detector.py`), its leases come back, and the rows that it stored are read elsewhere or generated again.
"""

import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from ...comm import threads
from ...comm.clock import REAL_TIME, Clock
from ...comm.disk import say, tell
from ...comm.fleet import Fleet
from ...comm.mailbox import Envelope
from ...comm.messages import (
    DeclaredDead,
    Failed,
    HeldRows,
    Interrupted,
    ListStoredRows,
    StatusRequested,
    StoredRows,
    TrainingDone,
)
from ...comm.messages.base import storage_id_of
from ...comm.recipe import Recipe
from ..journal import events as ev
from ..journal.opening import check_journal_is_there, open_journal
from ..journal.records import RowStatus
from ..queue.admission import Admission
from ..queue.batch import TRAIN
from ..queue.evaluation_prompts import open_evaluation
from ..queue.schedules import schedule_of
from ..queue.tasks import open_sampler, pipeline
from .failure_detector import Death, FailureDetector
from .health import PATIENCE_S
from .hub import Hub
from .model_check import ModelCheck
from .overview import Overview, expected_names
from .prompts import open_curriculum, open_prompts
from .shutdown import Shutdown, names_by_host, write_summary
from .start_lines import StartLines

log = logging.getLogger(__name__)

WATCH_S = 0.2
SHUTDOWN_DEADLINE_S = 15.0  # below the 20 s after which a supervisor kills its child


def run(
    fleet: Fleet, recipe: Recipe, clock: Clock | None = None, on_open: Callable[[Hub], None] = lambda _: None
) -> None:
    """The hub's process, from the first message to the summary; `on_open` is called with the hub before that message."""
    hub = open_hub(fleet, recipe, clock or REAL_TIME)
    on_open(hub)
    loop = HubLoop(hub, fleet, expected_names(recipe))
    loop.recover()
    while (end := loop.step()) is None:
        pass
    ended = Shutdown(hub, fleet, SHUTDOWN_DEADLINE_S, recipe.checkpoint.grace_s).run(end)
    write_summary(Path(recipe.run.dir), ended | {"hosts": names_by_host(loop.detector.seen.values())})
    hub.context.journal.close()
    hub.mailbox.close()


def open_hub(fleet: Fleet, recipe: Recipe, clock: Clock) -> Hub:
    """The hub of a recipe, with its inbox, and its journal in the run folder."""
    queue = recipe.queue
    tasks = pipeline(recipe.queue, recipe.algorithm)
    mailbox = fleet.open_mailbox("hub")
    pool = open_prompts(recipe.data, recipe.run.seed)
    check_journal_is_there(Path(recipe.run.dir), fleet.incarnation)
    state, journal = open_journal(recipe, tasks[TRAIN].needs, fleet.run_id, clock, pool.sizes)
    schedule = schedule_of(recipe.run, recipe.rollout)
    sampler = open_sampler(queue.sampler)
    calls_s = (recipe.comm.deadline_s, recipe.reward.timeout_s, recipe.environment.timeout_s)
    micro_tokens = recipe.optimizer.micro_batch * recipe.roles.actor
    admission = Admission(recipe.batch, queue, recipe.run.steps, schedule, sampler, micro_tokens)
    evaluation = open_evaluation(recipe.data, recipe.eval, recipe.run.steps, recipe.num_replicas)
    curriculum = open_curriculum(recipe.data.curriculum, recipe.run.seed)
    return Hub(
        mailbox, state, journal, pool, admission, queue, recipe.repack, clock.now, tasks, clock.wall,
        evaluation=evaluation, curriculum=curriculum, patience_s=max(PATIENCE_S, 4 * max(calls_s)),
        takers="agent" if recipe.environment.is_served else "rollout",
    )  # fmt: skip


class HubLoop:
    """Handles one message after the other, and checks the fleet at intervals."""

    def __init__(self, hub: Hub, fleet: Fleet, expected: Sequence[str] = ()) -> None:
        """expected: the processes of the run's recipe."""
        self.hub = hub
        self.fleet = fleet
        self.overview = Overview(hub, expected, threads.seconds)
        self._start_lines = StartLines(expected, is_told=fleet.incarnation > 1)
        self.detector = FailureDetector(fleet)
        self._printed = {""}
        self._models = ModelCheck()
        self._joined: dict[str, int] = {}
        """The incarnations that have joined, by name."""
        self._checked_at = 0.0
        hub.routes[StatusRequested] = self._on_status_requested  # it is answered while the run ends, too

    def step(self) -> ev.Ending | None:
        """Handle at most one message; returns how the run ends, or None while it continues."""
        if (end := self._end()) is not None:
            return end
        envelope = self.hub.mailbox.receive(WATCH_S)
        message = envelope.message if envelope else None
        # A short run is over before the first check is due.
        if isinstance(message, TrainingDone | Failed | Interrupted) or threads.seconds() - self._checked_at >= WATCH_S:
            self._check_fleet()
        return None if envelope is None else self._dispatch(envelope)

    def _end(self) -> ev.Ending | None:
        """The end of the run that no message reports."""
        if failure := self.hub.context.journal.full or self.hub.context.failure:
            return ev.Ending(status="failed", error=failure, exit_code=1)
        return self.hub.state.ending  # the hub before began to end the run

    def _dispatch(self, envelope: Envelope) -> ev.Ending | None:
        """Act on a message; returns the end of the run if it reports one."""
        self.overview.observe(envelope)
        match envelope.message:
            case TrainingDone(facts=facts):
                log.info("the trainer has ended")
                return ev.Ending(status="finished", gone=envelope.sender, facts=facts)
            case Failed(error=error, exit_code=exit_code):
                return ev.Ending(status="failed", error=error, exit_code=exit_code, gone=envelope.sender)
            case Interrupted(signal=number):
                error = f"ended by {signal.Signals(number).name}"
                return ev.Ending(status="interrupted", error=error, exit_code=128 + number)
            case HeldRows():
                pass  # the rollout was drained, so it holds none
            case StoredRows(keys=keys):
                self.hub.results.drop_needless(envelope.sender, keys)
            case message if not self.hub.handle(envelope):
                log.warning("the hub has no route for %s from %s; dropped", type(message).__name__, envelope.sender)
            case _:
                pass
        self._start_lines.look(envelope, self.hub.state)
        return None

    def _on_status_requested(self, sender: str, message: StatusRequested) -> None:
        self.hub.mailbox.send(message.reply_to, self.overview.report(self.fleet.members()))

    def recover(self) -> None:
        """Catch up with the deaths of processes and storage units since the previous hub stopped; a new run has none.

        The previous hub may have died before it sent its last decisions: grants are repeated, and the rows that units hold without
        need are dropped. In a run that is resumed a unit has the rows of the saved queue alone, which are needed.
        """
        state = self.hub.state
        living = {member.name: member for member in self.fleet.members() if member.is_alive}
        self.hub.context.relays |= {relay.name for relay in self.fleet.alive_members("relay")}
        stored = {unit for _, row in state.rows(RowStatus.READY) for unit in row.storage_ids}
        present = {storage_id_of(relay.name, relay.incarnation) for relay in self.fleet.alive_members("relay")}
        for unit in sorted(stored - present):
            self.hub.on_storage_lost(unit, "gone while the hub was restarting")
        for holder in sorted(state.held):
            if holder not in living or living[holder].incarnation != state.incarnations[holder]:
                self.hub.on_process_death(holder, "gone while the hub was restarting")
        for record in state.tasks.values():
            for consumer in {batch.consumer for batch in record.open_batches.values()} - living.keys():
                self.hub.on_process_death(consumer, "gone while the hub was restarting")
        if state.ending is None:
            if state.checkpointed >= 0 and not state.grants:  # the hub before may not have had the saved queue yet
                self.hub.saved_queue.restore()
            elif state.hub_restarts:
                for relay in self.fleet.alive_members("relay"):
                    self.hub.mailbox.send(relay.name, ListStoredRows())
            self.hub.leases.repeat_grants()

    def _check_fleet(self) -> None:
        self._checked_at = threads.seconds()
        for relay in self.detector.survivors(self.hub.state.lost_storage_ids):
            self.hub.mailbox.send(relay.name, DeclaredDead(relay.incarnation))
        for death in self.detector.deaths():
            self._on_death(death)
        for member in self.detector.living.values():
            if self._joined.get(member.name) != member.incarnation:
                self._joined[member.name] = member.incarnation
                log.info("%s has joined, incarnation %d, on %s", member.name, member.incarnation, member.host_name)
        self.overview.look(self.detector.members)
        self._start_lines.joined(self.detector.seen)
        self._print_facts()
        self._check_models()
        self.hub.health.watch()

    def _print_facts(self) -> None:
        """Print each new description of a rollout's generator, and the front's address: of all logs, only the hub's and rank 0's reach the console."""
        for member in self.detector.living.values():
            description = member.info.get("generator", "")
            if description not in self._printed:
                self._printed.add(description)
                tell(f"generator: {description}")
        for member in self.detector.members:
            url = member.info.get("url", "") if member.role == "front" else ""
            if url not in self._printed:
                self._printed.add(url)
                tell(f"the rollouts answer requests at {url}/v1")

    def _check_models(self) -> None:
        """A process with another policy ends the run; one of a host that has joined is refused alone."""
        for member, reason, ends_run in self._models.differences([*self.detector.seen.values()]):
            if ends_run:
                self.hub.context.failure = reason
            else:
                say(f"{member.name} is refused: {reason}")
                self.hub.on_process_death(member.name, "refused")
                self.hub.leases.stop(member.name)

    def _on_death(self, death: Death) -> None:
        dead = death.member
        log.info(
            "%s is dead: %s; it had %d leased rows",
            dead.name,
            death.reason,
            len(self.hub.state.held.get(dead.name, ())),
        )
        if dead.role == "relay":
            self.hub.on_storage_lost(storage_id_of(dead.name, dead.incarnation), death.reason)
        self.hub.on_process_death(dead.name, death.reason)
