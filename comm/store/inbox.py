"""One inbox of the store: the messages that have no reader yet, and those that the reader has not confirmed."""

from collections import deque

from .protocol import Delivery


class StoredInbox:
    """The messages of an inbox, in order of arrival."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._kept: deque[Delivery] = deque()
        self._num_messages = 0
        self._confirms = False
        self.num_opened = 0
        """How often a reader has opened it."""
        self.is_open = False
        self.is_closed = False
        """Its last reader is gone; further messages are dropped."""

    def open(self, *, confirms: bool) -> list[Delivery]:
        """Open it for a new reader; returns the messages that wait for it."""
        self.num_opened += 1
        self.is_open = True
        self.is_closed = False
        self._confirms = confirms
        waiting = list(self._kept)
        if not confirms:
            self._kept.clear()
        return waiting

    def add(self, sender: str, sequence: int, body: bytes) -> Delivery | None:
        """Add a message; returns the delivery for the reader, or None if the inbox is not open."""
        if self.is_closed:
            return None
        self._num_messages += 1
        delivery = Delivery(self._name, sender, sequence, body, self._num_messages)
        if self._confirms or not self.is_open:
            self._kept.append(delivery)
        return delivery if self.is_open else None

    def confirm(self, place: int) -> None:
        """Drop the messages up to and including this place."""
        while self._kept and self._kept[0].place <= place:
            self._kept.popleft()

    def close(self, *, is_last: bool = False) -> None:
        """The reader is gone. After the last reader the messages are dropped too."""
        self.is_open = False
        if is_last:
            self.is_closed = True
            self._kept.clear()
