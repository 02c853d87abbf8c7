"""The relay's process: a storage unit for rows and a keeper of weight versions.

Consumes its mailbox; waits for letters only; woken by the hub (rows to drop or count, the end). Weights and rows themselves
come and go on threads and a store of their own, never through this loop.
"""

import time

from ..comm.fleet import Fleet
from ..comm.links.opening import staging_of
from ..comm.messages import BusyReport, ConnectionLost, DropRows, ListStoredRows, Stop, StoredRows
from ..comm.recipe import Recipe
from ..comm.shared_memory import Segment
from .weights.server import WeightServer

REPORT_S = 1.0


def run(fleet: Fleet, recipe: Recipe) -> None:
    """The relay's process, until the hub's `Stop`."""
    mailbox = fleet.open_mailbox(fleet.name)
    unit = fleet.host_rows(lambda member, incarnation: mailbox.send("hub", ConnectionLost(member, incarnation)))
    segment = Segment.inherited()
    keeper = WeightServer(fleet, segment, recipe.comm).start()
    fleet.announce(unit=unit.address, segment=segment.path, staging=staging_of(recipe.relay))
    started, reported = time.monotonic(), 0.0
    while True:
        letter = mailbox.receive(REPORT_S)
        match letter.message if letter else None:
            case DropRows(keys=keys):
                unit.drop(keys)
            case ListStoredRows():
                mailbox.send("hub", StoredRows(list(unit.listing())))
            case Stop():
                break
        if time.monotonic() - reported >= REPORT_S:
            reported = time.monotonic()
            mailbox.send("hub", busy_report(reported - started))
    keeper.close()
    segment.close()
    unit.close()
    mailbox.close()


def busy_report(elapsed_s: float) -> BusyReport:
    """A relay is busy while its process computes or copies: CPU seconds against seconds passed."""
    busy_s = min(time.process_time(), elapsed_s)
    return BusyReport(busy_s, elapsed_s - busy_s)
