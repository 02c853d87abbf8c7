"""The relay's process: a storage unit for rows and a server of weight versions.

Consumes its mailbox; waits for messages only; woken by the hub (rows to drop, list, save or restore, the end). The bytes of weights and rows
go through threads and links of their own, never through this loop.
"""

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from ..comm import threads
from ..comm.errors import PeerGone
from ..comm.fleet import Fleet
from ..comm.mailbox import Mailbox
from ..comm.messages import (
    BusyReport,
    DeclaredDead,
    DropRows,
    ListStoredRows,
    RestoreQueue,
    SaveQueue,
    Stop,
    StoredRows,
)
from ..comm.recipe import Recipe
from ..comm.shared_memory import Segment
from .queue.replicated_rows import ReplicatedRows
from .queue.saved_queue import QueueKeeper
from .weights.server import WeightServer

log = logging.getLogger(__name__)

REPORT_S = 1.0


class Unit(Protocol):
    """A storage unit, as the process sees it that hosts it."""

    def drop(self, keys: Iterable[str]) -> int: ...

    def listing(self) -> list[str]: ...


def run(fleet: Fleet, recipe: Recipe) -> None:
    """Run the relay's process until the hub's `Stop`."""
    mailbox = fleet.open_mailbox(fleet.name)
    segment = Segment.inherited()
    unit = fleet.host_rows()
    weights = WeightServer(fleet, segment, recipe.comm).start()
    fleet.announce(unit=unit.address, segment=segment.path)
    serve_rows(fleet, Path(recipe.run.dir), mailbox, unit)
    weights.close()
    segment.close()
    unit.close()
    mailbox.close()


def serve_rows(fleet: Fleet, run_dir: Path, mailbox: Mailbox, unit: Unit) -> None:
    """Carry out the hub's orders for the rows of a unit, until its `Stop`. Raises `PeerGone` if this process counts as dead."""
    storage = ReplicatedRows(fleet)
    keeper = QueueKeeper(run_dir, storage, lambda answer: mailbox.send("hub", answer)).start()
    started = threads.seconds()
    reported = 0.0
    while True:
        envelope = mailbox.receive(REPORT_S)
        match envelope.message if envelope else None:
            case DropRows(keys=keys):
                unit.drop(keys)
            case ListStoredRows(at_end=at_end):
                mailbox.send("hub", StoredRows(unit.listing(), at_end))
            case SaveQueue() | RestoreQueue() as order:
                keeper.submit(order)
            case DeclaredDead(incarnation=incarnation) if incarnation == fleet.incarnation:
                raise PeerGone(
                    f"{fleet.name} was silent and was declared dead; its next process has a new storage unit"
                )
            case Stop(reason=reason):
                log.info("stopped by the hub (%s)", reason)
                break
        if threads.seconds() - reported >= REPORT_S:
            reported = threads.seconds()
            mailbox.send("hub", busy_report(reported - started))
    keeper.close()


def busy_report(elapsed_s: float) -> BusyReport:
    """The relay's busy seconds, which are its CPU seconds since the start, and its idle seconds, which are the rest."""
    busy_s = min(time.process_time(), elapsed_s)
    return BusyReport(busy_s, elapsed_s - busy_s)
