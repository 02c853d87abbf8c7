"""Weight servers in processes of their own, on a real store and real links."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.closing import at_end

from headrace.comm.environment import SEGMENT_FD
from headrace.comm.fleet import StoreFleet
from headrace.comm.memfd import create_memory
from headrace.comm.recipe import CommSettings
from headrace.comm.store.server import StoreServer
from headrace.comm.waits import waiting
from headrace.relay.weights.layout import Layout
from headrace.relay.weights.publisher import WeightPublisher
from headrace.relay.weights.reader import WeightReader

PATIENCE_S = 240.0
RELAY = """
import os, sys
from headrace.comm.fleet import StoreFleet
from headrace.comm.recipe import CommSettings
from headrace.comm.shared_memory import Segment
from headrace.relay.weights.server import WeightServer
segment = Segment.inherited()
settings = CommSettings(link=sys.argv[3], expiry_s=60)
fleet = StoreFleet.join(sys.argv[1], "relay", int(sys.argv[2]), b"s", {"segment": segment.path}, settings)
server = WeightServer(fleet, segment, settings).start()
print("ready", flush=True)
sys.stdin.readline()
server.close()
fleet.leave()
"""


class Processes:
    """A store here, relays in processes of their own, each with a segment that this process holds as its supervisor."""

    def __init__(self, link):
        self.hosted = StoreServer("127.0.0.1", b"s").start()
        self.settings = CommSettings(link=link, expiry_s=PATIENCE_S, deadline_s=PATIENCE_S)
        self.layout = Layout.of(weights(0), "float32")
        self.relays, self.segments, self.closing = [], [], []
        at_end(self.hosted.close)
        at_end(self.close)

    def relay(self, index):
        if index == len(self.segments):
            self.segments.append(create_memory("headrace-test"))
            self.relays.append(None)
        fd = self.segments[index]
        command = [sys.executable, "-c", RELAY, self.hosted.address, str(index), self.settings.link]
        environment = {**os.environ, SEGMENT_FD: str(fd)}
        pipe = subprocess.PIPE
        relay = subprocess.Popen(command, env=environment, pass_fds=[fd], stdin=pipe, stdout=pipe, text=True)
        assert relay.stdout and relay.stdout.readline() == "ready\n"
        self.relays[index] = relay

    def kill(self, index):
        self.relays[index].kill()
        self.relays[index].communicate()

    def join(self, role, index=0):
        fleet = StoreFleet.join(self.hosted.address, role, index, b"s", {}, self.settings)
        self.closing.append(fleet.leave)
        return fleet

    def publisher(self):
        publisher = WeightPublisher(self.join("actor"), self.layout, self.settings).start()
        self.closing.append(publisher.close)
        return publisher

    def reader(self, index=0):
        reader = WeightReader(self.join("rollout", index), self.layout, self.settings)
        self.closing.append(reader.close)
        return reader

    def close(self):
        while self.closing:
            self.closing.pop()()
        for relay in self.relays:
            if relay.poll() is None:
                relay.communicate("\n", timeout=PATIENCE_S)
        while self.segments:
            os.close(self.segments.pop())


def weights(version):
    generator = torch.Generator().manual_seed(version)
    return {"embed": torch.randn(500, 300, generator=generator), "norm": torch.full((300,), float(version))}


def pulled(processes, reader, version):
    with waiting("the relays", f"version {version}", PATIENCE_S) as wait:
        wait.until(lambda: reader.newest() == version)
    into = np.zeros(processes.layout.num_bytes, np.uint8)
    receipt = reader.pull(into, PATIENCE_S)
    assert all(torch.equal(processes.layout.views(into)[name], tensor) for name, tensor in weights(version).items())
    return receipt.version


@pytest.fixture(params=["auto", "tcp"])
def processes(request):
    return Processes(request.param)


def test_versions_travel_between_processes_over_each_kind_of_link(processes):
    processes.relay(0)
    processes.relay(1)
    publisher = processes.publisher()
    readers = [processes.reader(index) for index in (0, 1)]
    for version in (1, 2):
        publisher.publish(version, weights(version))
        assert [pulled(processes, reader, version) for reader in readers] == [version, version]
    publisher.close()


def test_versions_outlive_the_relays_process_and_the_next_process_takes_the_next():
    processes = Processes("auto")
    processes.relay(0)
    publisher, reader = processes.publisher(), processes.reader()
    publisher.publish(1, weights(1))
    assert pulled(processes, reader, 1) == 1
    processes.kill(0)
    assert pulled(processes, reader, 1) == 1
    publisher.publish(2, weights(2))
    processes.relay(0)
    assert pulled(processes, reader, 2) == 2
