"""The hub: the one decision maker. It reads its mailbox, decides, appends to the journal, applies, and acts.

It never carries bulk data and never waits for anybody: a request that cannot be met yet stays on the list of its office and
is looked at again after the next letter.
"""

import time
from collections.abc import Callable, Mapping

from ...comm.mailbox import Letter, Mailbox
from ...comm.messages import CheckpointWritten, Load, Pulled, VersionComplete
from ...comm.recipe import QueueSettings, RepackSettings
from ..journal import events as ev
from ..journal.journal import Journal
from ..journal.state import HubState
from ..prompts import PromptPool
from ..queue.admission import Admission
from ..queue.controller import Task
from ..queue.tasks import TRAIN, controllers, open_sampler
from .context import Books, Office, Rules
from .dispatch import HandOuts
from .leases import Leases
from .lost_rows import Copies
from .repacking import Repacking
from .results import Results
from .telemetry import Telemetry


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
        self.books = Books(mailbox, state, journal)
        self.telemetry = Telemetry()
        self.leases = Leases(self.books, pool, admission)
        self.results = Results(self.books, queue)
        self.hand_outs = HandOuts(self.books, admission, self.telemetry, controllers(tasks or {}))
        if tasks:
            admission.needs = tasks[TRAIN].needs
        admission.sampler = open_sampler(queue.sampler)
        self.copies = Copies(self.books)
        self.repacking = Repacking(self.books, repack, self.telemetry, clock)
        # Handing out comes before leasing, since it makes room.
        self.offices: tuple[Office, ...] = (
            self.copies,
            self.results,
            self.hand_outs,
            self.leases,
            self.repacking,
        )
        self.rules: Rules = {
            VersionComplete: self._on_version_complete,
            Pulled: self._on_pulled,
            CheckpointWritten: self._on_checkpoint,
            Load: self._on_load,
        }
        for office in self.offices:
            self.rules |= office.rules

    @property
    def mailbox(self) -> Mailbox:
        """The hub's inbox and its way to answer."""
        return self.books.mailbox

    @property
    def state(self) -> HubState:
        """The fold of the journal; to be read only."""
        return self.books.state

    def handle(self, letter: Letter) -> bool:
        """Act on a letter; False if this hub has no rule for it."""
        rule = self.rules.get(type(letter.message))
        if rule is None:
            return False
        rule(letter.sender, letter.message)
        self._serve()
        return True

    def on_process_death(self, process: str, reason: str) -> None:
        """A process died, named as in the fleet: its leases and hand-outs come back, and its counters are forgotten."""
        self.telemetry.forget(process)
        for office in self.offices:
            office.on_process_death(process, reason)
        self._serve()

    def on_storage_lost(self, unit: str, reason: str) -> None:
        """A storage unit is gone with its relay's process, named as in `relay.units`; a second call changes nothing."""
        self.copies.on_storage_lost(unit, reason)
        self._serve()

    def _serve(self) -> None:
        for office in self.offices:
            office.serve()

    def _on_version_complete(self, sender: str, message: VersionComplete) -> None:
        relay = sender.partition("/")[0]
        self.books.relays.add(relay)
        self.repacking.is_due |= message.version > self.state.version
        event = ev.Published(version=message.version, digest=message.digest, relay=relay)
        self.books.decide(event)

    def _on_load(self, sender: str, load: Load) -> None:
        self.telemetry.add(sender, load)
        self.repacking.observe(sender, load)

    def _on_pulled(self, sender: str, message: Pulled) -> None:
        self.books.decide(ev.Received(version=message.version, digest=message.digest, holder=sender))

    def _on_checkpoint(self, sender: str, message: CheckpointWritten) -> None:
        self.books.decide(ev.Checkpointed(step=message.step, path=message.path))
