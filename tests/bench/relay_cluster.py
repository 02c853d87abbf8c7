"""An emulated cluster: each relay is a process, the actor and the readers are in this one.

    python -m bench.relay_cluster STORE INDEX PACE SMALLEST LARGEST SETTINGS      (one relay)

prints `VERSION SECONDS` (of the machine's monotonic clock) for each version that the relay has completely received.
"""

import select
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self
from unittest.mock import patch

import msgspec
import torch
from support.throttled_link import ThrottledLink

from headrace.comm.fleet import StoreFleet
from headrace.comm.links.base import Link
from headrace.comm.recipe import CommSettings
from headrace.comm.shared_memory import Segment
from headrace.comm.store.server import StoreServer
from headrace.relay.weights import transfer
from headrace.relay.weights.layout import Layout
from headrace.relay.weights.publisher import WeightPublisher
from headrace.relay.weights.reader import WeightReader
from headrace.relay.weights.server import WeightServer

from .harness import BenchProcess, command

_SECRET = b"bench"


class PacedFleet(StoreFleet):
    """A member whose links send at most `pace` bytes per second."""

    pace = float("inf")

    def open_link(self, name: str, end: int, deadline_s: float, backend: str = "tcp") -> Link:
        return ThrottledLink(super().open_link(name, end, deadline_s, backend), self.pace)


class RelayCluster:
    """A store, relays in processes, an actor and readers in this process."""

    def __init__(
        self,
        num_relays: int,
        num_bytes: int,
        places: Sequence[tuple[list[str], str]] = (),
        pace: float | None = None,
        chunk_bytes: int | None = None,
        **settings: Any,
    ) -> None:
        """`pace` is the most bytes per second of a link, `chunk_bytes` the size of chunks; `settings` are fields of `CommSettings`.
        `places` has for each relay the words before its command that run it on its host, and its interface there."""
        usual = {"interface": "127.0.0.1", "link": "tcp", "expiry_s": 30.0, "deadline_s": 60.0}
        self._settings = CommSettings(**{**usual, **settings})
        self._places = places or [([], self._settings.interface)] * num_relays
        self._pace = pace or float("inf")
        self._chunks = (chunk_bytes, chunk_bytes) if chunk_bytes else transfer.CHUNK_RANGE
        self._received = [(0, 0.0)] * num_relays
        self._stack = ExitStack()
        self.tensors = {f"w{i}": torch.full((num_bytes // 32,), float(i)) for i in range(8)}
        self.layout = Layout.of(self.tensors, "float32")
        self.version = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(patch.object(transfer, "CHUNK_RANGE", self._chunks))
            self._hosted = StoreServer(self._settings.interface, _SECRET).start()
            stack.callback(self._hosted.close)
            self.relays = [stack.enter_context(self._start(index)) for index in range(len(self._places))]
            self._actor = self._join("actor", stack)
            self._actor.wait_for("relay", len(self.relays), 120, having="segment")
            self.publisher = WeightPublisher(self._actor, self.layout, self._settings).start()
            stack.callback(self.publisher.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # pyright: ignore[reportArgumentType]

    def reader(self) -> WeightReader:
        """A reader of the nearest relay."""
        reader = WeightReader(self._join("rollout", self._stack), self.layout, self._settings)
        self._stack.callback(reader.close)
        return reader

    def publish(self) -> float:
        """Publish the next version; returns the actor's stall in seconds."""
        self.version += 1
        for tensor in self.tensors.values():
            tensor[0] = self.version
        started = time.monotonic()
        self.publisher.publish(self.version, self.tensors)
        return time.monotonic() - started

    def push(self) -> float:
        """Publish; returns the seconds until the last relay has the version."""
        started = time.monotonic()
        self.publish()
        return self.wait_for_relays() - started

    def wait_for_relays(self, without: frozenset[int] = frozenset()) -> float:
        """The time at which the newest version has arrived at all relays except those in `without`."""
        for index, relay in enumerate(self.relays):
            while index not in without and self._received[index][0] < self.version:
                version, arrival = relay.line(deadline_s=120).split()
                self._received[index] = int(version), float(arrival)
        return max(arrival for index, (_, arrival) in enumerate(self._received) if index not in without)

    def _join(self, role: str, stack: ExitStack) -> PacedFleet:
        fleet = PacedFleet.join(self._hosted.address, role, 0, _SECRET, {}, self._settings)
        fleet.pace = self._pace
        stack.callback(fleet.leave)
        return fleet

    def _start(self, index: int) -> BenchProcess:
        enter, interface = self._places[index]
        settings = msgspec.json.encode({**msgspec.to_builtins(self._settings), "interface": interface}).decode()
        return BenchProcess(
            [*enter, *command("relay_cluster", self._hosted.address, index, self._pace, *self._chunks, settings)]
        )


def _relay(address: str, index: int, pace: float, settings: CommSettings) -> None:
    """One relay, until its standard input ends."""
    segment = Segment.create_anonymous()
    fleet = PacedFleet.join(address, "relay", index, _SECRET, {"segment": segment.path}, settings)
    fleet.pace = pace
    server = WeightServer(fleet, segment, settings).start()
    version = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        if (newest := server.newest) is not None and newest > version:
            version = newest
            print(version, time.monotonic(), flush=True)
        time.sleep(1e-3)
    server.close()
    fleet.leave()


if __name__ == "__main__":
    transfer.CHUNK_RANGE = (int(sys.argv[4]), int(sys.argv[5]))
    _relay(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), msgspec.json.decode(sys.argv[6], type=CommSettings))
