"""The hub: the one decision maker. It reads its mailbox, decides, appends to the journal, applies, and acts.

It never carries bulk data and never waits for anybody: a request that cannot be met yet stays on the list of its office and
is looked at again after the next letter.
"""

import time
from collections.abc import Callable, Mapping

from ...comm.mailbox import Envelope, Mailbox
from ...comm.messages import BusyReport, CheckpointWritten, LoadReport, VersionReady, WeightsPulled
from ...comm.recipe import QueueSettings, RepackSettings
from ..dataset import PromptPool
from ..journal import events as ev
from ..journal.journal import Journal
from ..journal.state import HubState
from ..queue.admission import Admission
from ..queue.batch import TRAIN
from ..queue.controller import Task
from ..queue.tasks import controllers, open_sampler
from .context import Handler, HubContext, Routes
from .dispatch import Dispatcher
from .leases import Leases
from .lost_rows import LostRows
from .repacking import Repacking
from .results import Results
from .telemetry import FleetStats


class Hub:
    """Passes letters to the offices; every change of the state is an event in the journal first."""

    def __init__(
        self,
        mailbox: Mailbox,
        state: HubState,
        journal: Journal,
        pool: PromptPool,
        admission: Admission,
        queue: QueueSettings,
        repack: RepackSettings,
        clock: Callable[[], float] = time.monotonic,
        tasks: Mapping[str, Task] | None = None,
    ) -> None:
        self.context = HubContext(mailbox, state, journal)
        self.fleet_stats = FleetStats()
        self.leases = Leases(self.context, pool, admission)
        self.results = Results(self.context, queue)
        self.dispatcher = Dispatcher(self.context, admission, self.fleet_stats, controllers(tasks or {}))
        if tasks:
            admission.needs = tasks[TRAIN].needs
        admission.sampler = open_sampler(queue.sampler)
        self.copies = LostRows(self.context)
        self.repacking = Repacking(self.context, repack, self.fleet_stats, clock)
        # Handing out comes before leasing, since it makes room.
        self.handlers: tuple[Handler, ...] = (
            self.copies,
            self.results,
            self.dispatcher,
            self.leases,
            self.repacking,
        )
        self.routes: Routes = {
            VersionReady: self._on_version_ready,
            WeightsPulled: self._on_pulled,
            CheckpointWritten: self._on_checkpoint,
            LoadReport: self._on_load,
            BusyReport: self.fleet_stats.add,
        }
        for office in self.handlers:
            self.routes |= office.routes

    @property
    def mailbox(self) -> Mailbox:
        """The hub's inbox and its way to answer."""
        return self.context.mailbox

    @property
    def state(self) -> HubState:
        """The fold of the journal; to be read only."""
        return self.context.state

    def handle(self, envelope: Envelope) -> bool:
        """Act on a letter; False if this hub has no rule for it."""
        rule = self.routes.get(type(envelope.message))
        if rule is None:
            return False
        rule(envelope.sender, envelope.message)
        self._advance()
        return True

    def on_process_death(self, process: str, reason: str) -> None:
        """A process died, named as in the fleet: its leases and hand-outs come back, and its counters are forgotten."""
        self.fleet_stats.forget(process)
        for office in self.handlers:
            office.on_process_death(process, reason)
        self._advance()

    def on_storage_lost(self, unit: str, reason: str) -> None:
        """A storage unit is gone with its relay's process, named as in `relay.units`; a second call changes nothing."""
        self.copies.on_storage_lost(unit, reason)
        self._advance()

    def _advance(self) -> None:
        for office in self.handlers:
            office.advance()

    def _on_version_ready(self, sender: str, message: VersionReady) -> None:
        relay = sender.partition("/")[0]
        self.context.relays.add(relay)
        self.repacking.is_due |= message.version > self.state.version
        event = ev.Published(version=message.version, digest=message.digest, relay=relay)
        self.context.commit(event)

    def _on_load(self, sender: str, load: LoadReport) -> None:
        self.fleet_stats.add(sender, load)
        self.repacking.observe(sender, load)

    def _on_pulled(self, sender: str, message: WeightsPulled) -> None:
        self.context.commit(ev.Received(version=message.version, digest=message.digest, holder=sender))

    def _on_checkpoint(self, sender: str, message: CheckpointWritten) -> None:
        self.context.commit(ev.Checkpointed(step=message.step, path=message.path))
