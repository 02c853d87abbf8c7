"""What all offices of the hub share: its state, the journal, and the way to tell others."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ..comm.mailbox import Mailbox
from ..comm.messages import DropRows, RowId
from . import events as ev
from .journal import Journal, stamped
from .state import Group, HubState, apply

Rules = dict[type, Callable[[str, Any], None]]
"""What an office does about a message, by its type: called with the sender's name and the message."""


class Office(Protocol):
    """A part of the hub: the rules for some messages, and what it does about what became possible or was lost."""

    rules: Rules

    def serve(self) -> None:
        """Meet the requests that can be met now."""
        ...

    def lose(self, holder: str, reason: str) -> None:
        """Forget a process that is gone; what it held comes back."""
        ...


class Books:
    """The hub's state, which changes through `decide` alone."""

    def __init__(self, mailbox: Mailbox, state: HubState, journal: Journal) -> None:
        self.mailbox = mailbox
        self.state = state
        self.journal = journal
        self.units: set[str] = set()
        """The storage units that have been heard of."""

    def decide(self, event: ev.Event) -> None:
        """Journal an event, then let it take effect."""
        self.journal.append(stamped(event))
        apply(event, self.state)

    def drop(self, rows: Iterable[tuple[Group, int]], units: Iterable[str] | None = None) -> None:
        """Tell the units to forget rows, named by group and sample: where they lie, or wherever `units` says."""
        by_unit: dict[str, list[str]] = {}
        for group, sample in rows:
            row = group.rows[sample]
            key = RowId(group.id.epoch, group.id.prompt, sample).key(row.attempt)
            for unit in [row.unit] if units is None else units:
                by_unit.setdefault(unit, []).append(key)
        for unit, keys in by_unit.items():
            self.mailbox.send(unit, DropRows(keys))
