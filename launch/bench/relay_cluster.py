"""The emulated cluster of the benchmark: relays in processes of their own, and an actor here.

    python -m headrace.launch.bench.relay_cluster STORE INDEX LINK PACE INTERFACE CHUNK_BYTES

is one relay; it prints `VERSION SECONDS` (of the machine's monotonic clock) for each version that it holds whole.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch

from ...comm.fleet import Fleet
from ...comm.segment import Segment
from ...comm.settings import LARGE_COPIES, CommSettings
from ...comm.store import StoreServer
from ...comm.waits import waiting
from ...relay.keeper import WeightKeeper
from ...relay.layout import Layout
from ...relay.publisher import WeightPublisher
from ...relay.reader import WeightReader

ENVIRONMENT = {**LARGE_COPIES, "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Of the benchmark's processes: copies as a seat's children make them, and no word on hosts without a name."""
_SECRET = b"bench"


def bench_settings(link: str, pace: float, interface: str, chunk_bytes: int = 0) -> CommSettings:
    """Settings of a process of the cluster; pace 0 means none, `chunk_bytes` 0 leaves the choice to the program."""
    settings = CommSettings(interface=interface, link=link, heartbeat_s=0.3, expiry_s=30.0, deadline_s=60.0)
    return replace(settings, pace=pace or None, chunk_bytes=chunk_bytes or None)


class Hosts:
    """A store, relays in their own processes, an actor and a reader in this one."""

    def __init__(
        self,
        num_relays: int,
        num_bytes: int,
        link: str = "tcp",
        pace: float = 0.0,
        *,
        chunk_bytes: int = 0,
        interface: str = "127.0.0.1",
        places: Sequence[tuple[list[str], str]] = (),
    ) -> None:
        """`places` are, for each relay, the words that start a command where it is to run, and its interface there."""
        self._settings = bench_settings(link, pace, interface, chunk_bytes)
        self._hosted = StoreServer(interface)
        self._places = places or [([], interface)] * num_relays
        self._complete: dict[tuple[int, int], float] = {}
        self._listeners: list[threading.Thread] = []
        self.relays = [self._start(index) for index in range(num_relays)]
        self._actor = self._join("actor")
        self._actor.wait_for("relay", num_relays, 120, having="segment")
        self.tensors = {f"w{i}": torch.full((num_bytes // 32,), float(i)) for i in range(8)}
        self.layout = Layout.of(self.tensors, "float32")
        self.publisher = WeightPublisher(self._actor, self.layout, self._settings)
        self._readers: list[tuple[WeightReader, Fleet]] = []
        self.version = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for relay in self.relays:
            relay.send_signal(signal.SIGCONT)
        self.publisher.close()
        for reader, fleet in self._readers:
            reader.close()
            fleet.leave()
        self._actor.leave()
        for relay in self.relays:
            relay.terminate()
            relay.wait(30)
        for listener in self._listeners:
            listener.join(10)

    def reader(self) -> WeightReader:
        """A reader of the nearest relay."""
        fleet = self._join("rollout")
        self._readers.append((WeightReader(fleet, self.layout, self._settings), fleet))
        return self._readers[-1][0]

    def publish(self) -> float:
        """Publish the next version; returns the actor's stall in seconds."""
        self.version += 1
        for tensor in self.tensors.values():
            tensor[0] = self.version
        started = time.monotonic()
        self.publisher.publish(self.version, self.tensors)
        return time.monotonic() - started

    def push(self, without: frozenset[int] = frozenset()) -> float:
        """Publish, and wait for all relays but some; returns the seconds until the last had the version."""
        started = time.monotonic()
        self.publish()
        return self.wait(without) - started

    def wait(self, without: frozenset[int] = frozenset()) -> float:
        """The moment at which the last relay (but some) held the newest version."""
        wanted = [(index, self.version) for index in range(len(self.relays)) if index not in without]
        with waiting("the relays", f"version {self.version}", 120) as wait:
            wait.until(lambda: all(key in self._complete for key in wanted), 0.001)
        return max(self._complete[key] for key in wanted)

    def _join(self, role: str) -> Fleet:
        return Fleet.join(self._hosted.address, role, 0, _SECRET, {}, self._settings)

    def _start(self, index: int) -> "subprocess.Popen[str]":
        enter, interface = self._places[index]
        s = self._settings
        words = [self._hosted.address, str(index), s.link, str(s.pace or 0.0), interface, str(s.chunk_bytes or 0)]
        command = [*enter, sys.executable, "-m", "headrace.launch.bench.relay_cluster", *words]
        relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **ENVIRONMENT})
        self._listeners.append(threading.Thread(target=self._listen, args=(index, relay), daemon=True))
        self._listeners[-1].start()
        return relay

    def _listen(self, index: int, relay: "subprocess.Popen[str]") -> None:
        assert relay.stdout is not None
        with relay.stdout as lines:
            for line in lines:
                version, seconds = line.split()
                self._complete[index, int(version)] = float(seconds)


def _relay(address: str, index: int, settings: CommSettings) -> None:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    segment = Segment.create_anonymous()
    fleet = Fleet.join(address, "relay", index, _SECRET, {"segment": segment.path}, settings)
    keeper = WeightKeeper(fleet, segment, settings)
    version = 0
    while not ended.is_set():
        if (newest := keeper.desk.wait_newer(version, 0.2)) is not None:
            version = newest
            print(version, time.monotonic(), flush=True)
    keeper.close()
    fleet.leave()


if __name__ == "__main__":
    _, store, number, link, pace, interface, chunk = sys.argv
    _relay(store, int(number), bench_settings(link, float(pace), interface, int(chunk)))
