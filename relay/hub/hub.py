"""The hub: the one decision maker. It reads its mailbox, decides, appends to the journal, applies the event, and answers.

It carries no bulk data and never waits: a request that cannot be met yet stays with its handler, which looks at it again
after the next message.
"""

import logging
import time
from collections.abc import Callable, Mapping

from ...comm.disk import describe_unwritable, is_unwritable, say
from ...comm.mailbox import Envelope, Mailbox
from ...comm.messages import (
    ActorFailed,
    BusyReport,
    CheckpointWritten,
    LearningAlarm,
    LoadReport,
    RestartPoint,
    TrainerStarted,
    TrainerState,
    VersionReady,
    WeightsPulled,
)
from ...comm.messages.base import process_of
from ...comm.recipe import QueueSettings, RepackSettings
from ..checkpoints import CheckpointFolder
from ..dataset.order import PromptSource
from ..journal import events as ev
from ..journal.hub_state import HubState
from ..journal.journal import Journal
from ..queue.admission import Admission
from ..queue.evaluation_prompts import EvaluationPrompts
from ..queue.tasks import Task
from .context import Handler, HubContext, Routes
from .dispatch import Dispatcher
from .evaluations import Evaluations
from .health import PATIENCE_S, Health
from .leases import Leases
from .midway import Midway
from .partial_pool import PartialPool
from .prompts import Curriculum, Prompts
from .repacking import Repacking
from .results import Results
from .saved_queue import SavedQueue
from .telemetry import FleetStats
from .token_ledger import TokenLedger

log = logging.getLogger(__name__)

MAX_RESTARTS_IN_STEP = 3
"""Restarts of the trainer without a trained step between them; with one more its fault counts as a lasting one."""


class Hub:
    """Passes messages to their handlers; every change of the state is an event in the journal first."""

    def __init__(
        self,
        mailbox: Mailbox,
        state: HubState,
        journal: Journal,
        pool: PromptSource,
        admission: Admission,
        queue: QueueSettings,
        repack: RepackSettings,
        clock: Callable[[], float] = time.monotonic,
        tasks: Mapping[str, Task] | None = None,
        wall_clock: Callable[[], float] = time.time,
        evaluation: EvaluationPrompts | None = None,
        curriculum: Curriculum | None = None,
        patience_s: float = PATIENCE_S,
        takers: str = "rollout",
    ) -> None:
        self.context = HubContext(mailbox, state, journal, wall_clock)
        self.mailbox = mailbox
        self.state = state
        self.tokens = TokenLedger(state)
        self.fleet_stats = FleetStats(self.tokens)
        self._actor_error = ""
        self._is_memory_full = False
        self.results = Results(self.context, queue, self.fleet_stats)
        schedule = admission.schedule
        self.partials = PartialPool(self.context, clock, mixes_versions=schedule.mixes_versions)
        self.evaluations = Evaluations(self.context, evaluation, self.partials, schedule)
        self.prompts = Prompts(self.context, pool, curriculum)
        self.leases = Leases(self.context, self.prompts, admission, self.partials, self.evaluations)
        self.saved_queue = SavedQueue(self.context, self.prompts, admission, self.partials, clock)
        self.repacking = Repacking(self.context, repack, self.fleet_stats, clock)
        self.midway = Midway(self.context, admission, repacks=repack.is_enabled)
        dispatcher = Dispatcher(self.context, admission, self.fleet_stats, tasks or {}, self.evaluations)
        self.health = Health(
            self.context, queue, admission.per_step, dispatcher, self.fleet_stats, clock, patience_s, takers
        )
        # Rows are handed out before groups are leased, since that makes room in the queue.
        self.handlers: tuple[Handler, ...] = (
            self.prompts, self.results, self.saved_queue, self.evaluations, dispatcher, self.partials, self.leases,
            self.repacking, self.midway, self.health,
        )  # fmt: skip
        self.routes: Routes = {
            VersionReady: self._on_version_ready,
            WeightsPulled: self._on_pulled,
            CheckpointWritten: self._on_checkpoint,
            LearningAlarm: self._on_learning_alarm,
            ActorFailed: self._on_actor_failed,
            TrainerStarted: self._on_trainer_started,
            LoadReport: self._on_load,
            BusyReport: self.fleet_stats.add,
            TrainerState: lambda sender, message: None,  # for the overview alone
        }
        for handler in self.handlers:
            self.routes |= handler.routes

    def handle(self, envelope: Envelope) -> bool:
        """Act on a message; False if the hub has no route for it."""
        route = self.routes.get(type(envelope.message))
        if route is None:
            return False
        ended_before = self.state.tokens.ended
        self.tokens.observe(envelope.sender, envelope.message)
        route(envelope.sender, envelope.message)
        self.tokens.settle(envelope.message, ended_before)
        self.advance()
        return True

    def advance(self) -> None:
        """Meet the requests that can be met now."""
        for handler in self.handlers:
            handler.advance()

    def on_process_death(self, process: str, reason: str) -> None:
        """A process died, named as in the fleet: its leases and batches come back, and its counters are forgotten."""
        self.fleet_stats.forget(process)
        self.tokens.on_process_death(process, self.context)
        for handler in self.handlers:
            handler.on_process_death(process, reason)
        self.advance()

    def on_storage_lost(self, storage_id: str, reason: str) -> None:
        """A storage unit is lost with its relay's process; a second call changes nothing."""
        self.results.on_storage_lost(storage_id, reason)
        self.partials.on_storage_lost(storage_id)
        self.advance()

    def _on_version_ready(self, sender: str, message: VersionReady) -> None:
        relay = process_of(sender)
        self.context.relays.add(relay)
        self.repacking.is_due |= message.version > self.state.version
        self.context.commit(ev.Published(version=message.version, digest=message.digest, relay=relay))

    def _on_load(self, sender: str, load: LoadReport) -> None:
        self.fleet_stats.add(sender, load)
        self.repacking.observe(sender, load)
        self.midway.observe(sender, load)

    def _on_pulled(self, sender: str, message: WeightsPulled) -> None:
        num_unfinished, is_ordered = message.num_unfinished, message.is_ordered
        if num_unfinished:
            self.fleet_stats.count("weights/midway")
        self.context.commit(
            ev.Received(
                version=message.version,
                digest=message.digest,
                holder=sender,
                num_unfinished=num_unfinished,
                is_ordered=is_ordered,
            )
        )

    def _on_checkpoint(self, sender: str, message: CheckpointWritten) -> None:
        """`latest` names only a checkpoint that is in the journal. On a full disk it stays behind; a resumed run looks at all of them."""
        log.info("checkpoint of step %d: %s", message.step, message.path)
        self.context.commit(ev.Checkpointed(step=message.step, path=message.path))
        folder = CheckpointFolder(self.context.journal.path.parent)
        try:
            folder.set_latest(message.step)
        except OSError as error:
            if not is_unwritable(error):
                raise
            say(describe_unwritable(folder.root / "latest"))
        if self.state.ending is None:  # at the end of the run it is saved once more, with what the rollouts leave
            self.saved_queue.save()

    def _on_learning_alarm(self, sender: str, message: LearningAlarm) -> None:
        self.context.keep_alarm(message.text)
        if message.ends_run:
            self.context.failure = self.context.failure or message.text

    def _on_actor_failed(self, sender: str, message: ActorFailed) -> None:
        """The first error counts: the other ranks fail because of it."""
        self._actor_error = self._actor_error or f"{process_of(sender)}: {message.error}"
        self._is_memory_full |= message.is_memory_full

    def _on_trainer_started(self, sender: str, message: TrainerStarted) -> None:
        """The trainer continues after the last step that the journal has; batches that it held for other tasks come back."""
        state = self.state
        error = self._actor_error
        if message.incarnation > state.trainer_incarnation:
            self.on_process_death(sender, f"incarnation {message.incarnation - 1} is gone")
            restarted = ev.TrainerRestarted(
                incarnation=message.incarnation, error=error, is_memory_full=self._is_memory_full
            )
            self.context.commit(restarted)
            self._actor_error = ""
            self._is_memory_full = False
            if state.restarts_in_step > MAX_RESTARTS_IN_STEP:
                reason = f"the trainer died {state.restarts_in_step} times before step {state.step + 1} was trained"
                self.context.failure = f"{reason}: {error}" if error else reason
        self.mailbox.send(sender, RestartPoint(message.incarnation, state.step, state.num_memory_deaths))
