"""Hundreds of pushes and pulls on a real store: nothing is left behind, no read is torn."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch
from support.closing import at_end

from headrace.comm.fleet import StoreFleet
from headrace.comm.recipe import CommSettings
from headrace.comm.shared_memory import Segment
from headrace.comm.store.server import StoreServer
from headrace.comm.waits import waiting
from headrace.relay.weights.layout import Layout
from headrace.relay.weights.publisher import WeightPublisher
from headrace.relay.weights.reader import WeightReader
from headrace.relay.weights.server import WeightServer

NUM_FLOATS = 50_000
PATIENCE_S = 60.0


class Cluster:
    """Two relays, an actor and readers on a real store and real links, all in this process."""

    def __init__(self, link, num_readers=1):
        self.hosted = StoreServer("127.0.0.1", b"s").start()
        self.settings = CommSettings(link=link, deadline_s=PATIENCE_S)
        self.tensors = {"w": torch.zeros(NUM_FLOATS)}
        self.layout = Layout.of(self.tensors, "float32")
        self.fleets, self.closing = [], []
        at_end(self.hosted.close)
        at_end(self.close)
        self.servers = [self.server(index) for index in range(2)]
        self.publisher = WeightPublisher(self.join("actor", 0), self.layout, self.settings).start()
        self.readers = [
            WeightReader(self.join("rollout", index), self.layout, self.settings) for index in range(num_readers)
        ]
        self.closing += [*self.readers, self.publisher]

    def join(self, role, index, info=None):
        self.fleets.append(StoreFleet.join(self.hosted.address, role, index, b"s", info or {}, self.settings))
        return self.fleets[-1]

    def server(self, index):
        segment = Segment.create_anonymous()
        server = WeightServer(self.join("relay", index, {"segment": segment.path}), segment, self.settings).start()
        self.closing += [segment, server]
        return server

    def publish(self, version):
        self.tensors["w"].fill_(version)
        self.publisher.publish(version, self.tensors)

    def wait_for(self, version):
        with waiting("the relays", f"version {version}", PATIENCE_S) as wait:
            wait.until(lambda: all(server.newest == version for server in self.servers), 0.0005)

    def pull(self, reader, into, deadline_s=PATIENCE_S):
        receipt = reader.pull(into, deadline_s)
        floats = into.view(np.float32)[:NUM_FLOATS]
        assert (floats == receipt.version).all(), f"version {receipt.version} is mixed with {set(floats.tolist())}"
        return receipt.version

    def close(self):
        while self.closing:
            self.closing.pop().close()
        while self.fleets:
            self.fleets.pop().leave()


def footprint():
    """Threads, descriptors and resident megabytes of this process."""
    return (
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
        psutil.Process().memory_info().rss / 1e6,
    )


@pytest.mark.parametrize("link", ["auto", "tcp"])
def test_five_hundred_pushes_leave_nothing_behind(link):
    cluster = Cluster(link)
    into = np.zeros(cluster.layout.num_bytes, np.uint8)
    before = (0, 0, 0.0)
    for version in range(1, 501):
        cluster.publish(version)
        cluster.wait_for(version)
        cluster.pull(cluster.readers[0], into)
        if version == 100:
            before = footprint()
    after = footprint()
    assert after[0] <= before[0] + 1
    assert after[1] <= before[1] + 3
    assert after[2] <= before[2] + 8


@pytest.mark.parametrize(
    ("link", "num_versions"), [("auto", 500), ("tcp", 500), pytest.param("auto", 30_000, marks=pytest.mark.slow)]
)
def test_pulls_at_random_times_during_continuous_pushes_are_never_torn_and_never_wait(link, num_versions):
    cluster = Cluster(link, num_readers=3)
    cluster.publish(1)
    cluster.wait_for(1)
    for reader in cluster.readers:
        cluster.pull(reader, np.zeros(cluster.layout.num_bytes, np.uint8))
    stop, pulled = threading.Event(), set()

    def pull(reader):
        into, dice = np.zeros(cluster.layout.num_bytes, np.uint8), random.Random(id(reader))
        while not stop.wait(dice.uniform(0, 0.02)):
            pulled.add(cluster.pull(reader, into, deadline_s=0))  # a wait of any length would raise

    with ThreadPoolExecutor(3) as pool:
        pulling = [pool.submit(pull, reader) for reader in cluster.readers]
        try:
            for version in range(2, num_versions + 2):
                cluster.publish(version)
                if version % 10 == 0:
                    cluster.wait_for(version)
        finally:
            stop.set()
        for done in pulling:
            done.result()
    assert len(pulled) > 10
