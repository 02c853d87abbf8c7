"""Rollouts in virtual time: the real loop, its turns as events, and what it needs instead of threads and bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ....comm.errors import PeerGone
from ....comm.fleet import Fleet, Member
from ....comm.mailbox import Mailbox
from ....comm.messages.base import storage_id_of
from ....comm.messages.migration import TransferOffered
from ....comm.messages.weights import WeightsPulled
from ....comm.recipe import Recipe
from ....rollout.leased_row import LeasedRow
from ....rollout.migration.codec import MovedRow
from ....rollout.partial_rows import StreamedRow
from ..emulated.generator import EmulatedGenerator
from ..emulated.rewards import EmulatedRewards
from .world import OwnClock, World

UNIT = storage_id_of("relay-0", 1)
"""The storage unit that every row is said to be in."""


class VirtualVersions:
    """The relays: the newest version that a rollout can see."""

    def __init__(self) -> None:
        self.version: int | None = None

    def newest(self) -> int | None:
        return self.version

    def pull(self, into: np.ndarray, deadline_s: float) -> WeightsPulled:
        assert self.version is not None
        return WeightsPulled(self.version, "")

    def pull_version(self, version: int, into: np.ndarray) -> WeightsPulled:
        return WeightsPulled(version, "")

    def close(self) -> None:
        """Nothing to end."""


class VirtualWriter:
    """Reports finished rows without writing them."""

    backlog = 0

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def start(self) -> None:
        """Nothing to start."""

    def submit(self, row: LeasedRow | list[StreamedRow]) -> None:
        assert isinstance(row, LeasedRow), "emulated trajectories are not streamed"
        self._mailbox.send("hub", row.report([] if row.failure else [UNIT]))

    def close(self) -> None:
        """Nothing is left to write."""


@dataclass(slots=True)
class Parcel:
    """Trajectories on their way, for both ends; the emulated device waits for their keys and values."""

    content: list[MovedRow]
    num_bytes: int = 0
    path: str = "memory"
    link: str = ""
    seconds: float | None = None
    done: bool = True
    source_is_gone: Callable[[], bool] = lambda: False
    error: str = ""

    def rows(self) -> list[MovedRow]:
        if self.error:
            raise PeerGone(self.error)
        return self.content

    def close(self) -> None:
        self.content = []


class VirtualTransfers:
    """One rollout's transfers; `parcels` is shared by all rollouts."""

    def __init__(self, name: str, parcels: dict[tuple[str, int], Parcel]) -> None:
        self._name = name
        self.parcels = parcels

    def send(self, to: Member, request_id: int, rows: Sequence[MovedRow]) -> Parcel:
        """Copies the leases, since both ends change theirs."""
        copies = [
            MovedRow(replace(row.held, switches=[*row.held.switches], digests={**row.held.digests}), row.state)
            for row in rows
        ]
        parcel = self.parcels[self._name, request_id] = Parcel(copies)
        return parcel

    def receive(self, sender: str, offer: TransferOffered) -> Parcel:
        return Parcel(self.parcels.pop((sender, offer.request_id)).content)

    def close(self) -> None:
        """Nothing to end."""


class VirtualRollout:
    """A rollout whose turns are events. An idle one sleeps until a message, a version, or its next report."""

    def __init__(
        self, world: World, fleet: Fleet, recipe: Recipe, versions: VirtualVersions, transfers: VirtualTransfers
    ) -> None:
        from ....rollout.loop import Rollout  # a role's loop is imported where its process begins

        self.clock = OwnClock(world)
        self.generator = EmulatedGenerator(fleet, recipe, self.clock, versions)
        self.loop = Rollout(
            fleet,
            recipe,
            self.generator,
            EmulatedRewards(),
            clock=self.clock,
            row_writer=VirtualWriter(fleet.open_mailbox(fleet.name)),
            transfers=transfers,
        )
        self._world = world
        self._report_s = recipe.repack.report_s
        self._is_asleep = True
        self._num_sleeps = 0

    def wake(self) -> None:
        """Take a turn now, unless the present one has not ended."""
        if self._is_asleep:
            self._is_asleep = False
            self._world.at(self._world.now, self._turn)

    def _turn(self) -> None:
        before = self.clock.now()
        if self.generator.weights.version >= 0:
            self.loop.step()
        elif self.generator.weights.newest() >= 0:
            self.loop.begin()
        if self.clock.now() > before:
            self._world.at(self.clock.now(), self._turn)
        else:
            self._sleep()

    def _sleep(self) -> None:
        self._is_asleep = True
        self._num_sleeps += 1
        number = self._num_sleeps
        until = min(self.clock.now() + self._report_s, self.generator.weights.next_at)
        self._world.at(until, lambda: self.wake() if self._num_sleeps == number else None)
