"""Membership and mailboxes of a run in virtual time. Messages take `MESSAGE_S` to arrive."""

import os
import queue
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from ....comm.clock import Clock
from ....comm.fleet import Fleet, Member, member_name, sorted_members
from ....comm.links.base import Link
from ....comm.mailbox import Envelope, Inbox, Mailbox, Mailboxes
from ....comm.messages.base import process_of
from ....comm.recipe import CommSettings
from ....comm.store.protocol import Delivery, Post
from .world import World

MESSAGE_S = 0.005
"""Emulated seconds that a message takes."""


class VirtualMailbox(Mailbox):
    """A mailbox that never waits: the world brings the next message."""

    def receive(self, timeout_s: float) -> Envelope | None:
        return super().receive(0.0)


class VirtualMailboxes(Mailboxes):
    """One mailbox for each name; `wake` of a name is called when it has a message."""

    def __init__(self, world: World) -> None:
        self.wake: dict[str, Callable[[], None]] = {}
        self.clocks: dict[str, Clock] = {}
        """The clocks of the processes that may be ahead of the world."""
        self._world = world
        self._inboxes: dict[str, Inbox] = defaultdict(queue.SimpleQueue)
        self._mailboxes: dict[str, Mailbox] = {}

    def open(self, name: str) -> Mailbox:
        if name not in self._mailboxes:
            self._mailboxes[name] = VirtualMailbox(name, 1, self._inboxes[name], self)
        return self._mailboxes[name]

    def put(self, message: Post) -> None:
        clock = self.clocks.get(process_of(message.sender))
        sent_at = clock.now() if clock else self._world.now
        self._world.at(sent_at + MESSAGE_S, partial(self._deliver, message))

    def confirm(self, name: str, place: int) -> None:
        """No message is lost here."""

    def close_inbox(self, name: str, *, is_last: bool = False) -> None:
        """Nothing to end."""

    def close(self) -> None:
        """Nothing to end."""

    def _deliver(self, message: Post) -> None:
        if (wake := self.wake.get(message.to)) is not None:
            self._inboxes[message.to].put(Delivery(message.to, message.sender, message.sequence, message.body, 0))
            wake()


class LinklessFleet(Fleet):
    """A member of a run in one process, which needs no links and no process groups."""

    def open_link(self, name: str, end: int, deadline_s: float, backend: str = "tcp") -> Link:
        raise AssertionError("bytes do not travel in virtual time")

    def open_group(
        self, name: str, rank: int, size: int, backend: str, deadline_s: float, timeout: timedelta
    ) -> dist.ProcessGroup:
        raise AssertionError("a virtual trainer is one rank")


class VirtualFleet(LinklessFleet):
    """One member; `everyone` is shared by all members of the run."""

    def __init__(
        self, role: str, index: int, everyone: dict[str, Member], mailboxes: Mailboxes, settings: CommSettings
    ) -> None:
        me = Member(member_name(role, index), role, index, 1, "here", os.getpid(), {})
        super().__init__(me, mailboxes, settings)
        everyone[me.name] = me
        self._everyone = everyone

    @property
    def run_id(self) -> str:
        return "virtual"

    def members(self, role: str | None = None) -> list[Member]:
        return sorted_members(self._everyone.values(), role)

    def announce(self, **info: str) -> None:
        """No other process reads it."""

    def leave(self) -> None:
        """Nothing to end."""
