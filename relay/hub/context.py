"""What all offices of the hub share: its state, the journal, and the way to tell others."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ...comm.mailbox import Mailbox
from ...comm.messages import DropRows
from ..journal import events as ev
from ..journal.journal import Journal
from ..journal.state import Group, HubState, apply
from ..queue.replicated_rows import relay_of

Routes = dict[type, Callable[[str, Any], None]]
"""What an office does about a message, by its type: called with the sender's name and the message."""


class Handler(Protocol):
    """A part of the hub: the rules for some messages, and what it does about what became possible or was lost."""

    routes: Routes

    def advance(self) -> None:
        """Meet the requests that can be met now."""
        ...

    def on_process_death(self, process: str, reason: str) -> None:
        """Forget a dead process, named as in the fleet; everything that it held comes back."""
        ...


class HubContext:
    """The hub's state, which changes through `commit` alone."""

    def __init__(self, mailbox: Mailbox, state: HubState, journal: Journal) -> None:
        self.mailbox = mailbox
        self.state = state
        self.journal = journal
        self.relays: set[str] = set()
        """Those that have been heard of: each hosts a storage unit."""

    def commit(self, event: ev.Event) -> None:
        """Journal an event, then let it take effect."""
        self.journal.append(ev.stamped(event))
        apply(event, self.state)

    def drop_rows(self, rows: Iterable[tuple[Group, int]], *, everywhere: bool = False) -> None:
        """Tell the units to forget rows, named by group and sample: those that hold them, or all there are."""
        for_relay: dict[str, list[str]] = {}
        for group, sample in rows:
            row = group.rows[sample]
            key = group.row_id(sample).key(row.attempt)
            for relay in self.relays if everywhere else map(relay_of, row.storage_ids):
                for_relay.setdefault(relay, []).append(key)
        for relay, keys in for_relay.items():
            self.mailbox.send(relay, DropRows(keys))
