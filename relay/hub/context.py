"""State, journal and mailbox, which the hub's handlers share, and the base class of the handlers."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...comm.disk import say
from ...comm.messages import DropRows
from ...comm.messages.base import RowId, process_of
from ..journal import events as ev
from ..journal.hub_state import HubState
from ..journal.state import apply

if TYPE_CHECKING:
    from ...comm.mailbox import Mailbox
    from ..journal.journal import Journal

Routes = dict[type, Callable[[str, Any], None]]
"""Message type -> function that handles it, called with the sender's name and the message."""


class HubContext:
    """The hub's state, which changes through `commit` alone.

    `relays` are those heard of so far; leases are granted and moves are planned while `is_leasing`. While `awaits_queue`, the rows of
    a resumed run are read from the disk, and leases wait.
    """

    def __init__(
        self, mailbox: "Mailbox", state: HubState, journal: "Journal", wall_clock: Callable[[], float]
    ) -> None:
        self.mailbox = mailbox
        self.wall_clock = wall_clock
        self.state = state
        self.journal = journal
        self.relays: set[str] = set()
        self.is_leasing = True
        self.awaits_queue = False
        self.failure = ""
        """Why the run has to end; empty while it may go on."""
        self.alarm = ""
        """The last alarm, for `headrace status`."""

    def raise_alarm(self, text: str) -> None:
        """Print an alarm, and keep it for those who ask later."""
        say(f"alarm: {text}")
        self.keep_alarm(text)

    def keep_alarm(self, text: str) -> None:
        """Keep an alarm that is printed already."""
        self.alarm = f"after step {self.state.step}: {text}"

    def commit(self, event: ev.Event, *, drops: Iterable[RowId] = ()) -> None:
        """Write an event to the journal, then apply it. Its effects come after that: the units drop the rows `drops`.

        A hub that dies in between leaves bytes that nothing needs. In the other order it would leave rows without bytes.
        """
        dropped = self._keys_by_relay(drops)
        stamped = ev.stamped(event, self.wall_clock())
        self.journal.append(stamped)
        apply(stamped, self.state)
        if self.journal.needs_snapshot(event):
            self.journal.keep(self.state)
        self.send_drops(dropped)

    def drop_rows(self, rows: Iterable[RowId]) -> None:
        """Tell all relays to drop the bytes of these rows' attempts, which the journal does not have as ready."""
        keys = [row_id.key(self.state.groups[row_id.group].rows[row_id.sample].attempt) for row_id in rows]
        if keys:
            self.send_drops(dict.fromkeys(sorted(self.relays), keys))

    def send_drops(self, keys: Mapping[str, list[str]]) -> None:
        """Tell relays to drop rows, by the keys of their bytes."""
        for relay, dropped in keys.items():
            self.mailbox.send(relay, DropRows(dropped))

    def _keys_by_relay(self, rows: Iterable[RowId]) -> dict[str, list[str]]:
        """The keys of these rows by the relays that store them."""
        found: dict[str, list[str]] = {}
        for row_id in rows:
            row = self.state.groups[row_id.group].rows[row_id.sample]
            for relay in map(process_of, row.storage_ids):
                found.setdefault(relay, []).append(row_id.key(row.attempt))
        return found


class Handler:
    """A part of the hub: handles the messages in `routes`, and acts on what became possible or was lost."""

    routes: Routes

    def __init__(self, context: HubContext) -> None:
        self.context = context
        self.state = context.state

    def advance(self) -> None:
        """Meet the requests that can be met now."""

    def on_process_death(self, process: str, reason: str) -> None:
        """Forget a dead process, named as in the fleet, and take back what it holds."""
