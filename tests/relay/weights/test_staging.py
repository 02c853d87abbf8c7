"""Relays that receive weights through a staging device."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from support.closing import at_end
from support.system import System

from headrace.comm.errors import LinkBroken, SettingError
from headrace.comm.fleet import StoreFleet
from headrace.comm.recipe import CommSettings
from headrace.comm.shared_memory import Segment
from headrace.comm.store.server import StoreServer
from headrace.comm.waits import waiting
from headrace.relay.weights import chain
from headrace.relay.weights.layout import Layout
from headrace.relay.weights.publisher import WeightPublisher
from headrace.relay.weights.reader import WeightReader
from headrace.relay.weights.server import WeightServer


def test_a_relay_with_a_staging_device_takes_weights_through_it_and_shows_them_in_its_segment(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(chain, "remote_backend", lambda settings: "staged")  # buckets in host memory, over Gloo
    hosted, settings = StoreServer("127.0.0.1", b"s").start(), CommSettings(deadline_s=60)
    segment = Segment.create_anonymous()
    info = {"segment": segment.path}
    fleets = [
        StoreFleet.join(hosted.address, role, 0, b"s", info if role == "relay" else {}, settings)
        for role in ("relay", "actor", "rollout")
    ]
    server = WeightServer(fleets[0], segment, settings).start()
    tensors = {"w": torch.randn(5_000_003)}  # several buckets, and a rest
    layout = Layout.of(tensors, "float32")
    publisher, reader = (
        WeightPublisher(fleets[1], layout, settings).start(),
        WeightReader(fleets[2], layout, settings),
    )
    at_end(hosted.close)
    for close in (*(fleet.leave for fleet in fleets), segment.close, server.close, publisher.close, reader.close):
        at_end(close)
    into = np.zeros(layout.num_bytes, np.uint8)
    for version in (1, 2, 3):
        tensors["w"].mul_(1.5)
        publisher.publish(version, tensors)
        with waiting("the relay", f"version {version}", 60) as wait:
            wait.until(lambda version=version: reader.newest() == version)
        assert reader.pull(into, 60).version == version
        assert torch.equal(layout.views(into)["w"], tensors["w"])
    assert [link.backend for link in server._links] == ["staged"]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(fleets[0].open_link, "idle", 0, 60, "staged")
        link = fleets[1].open_link("idle", 1, 60, "staged")
        at_end(other.result().close)
    with pytest.raises(LinkBroken):  # a receive without a sender ends at its deadline
        link.receive(np.zeros(100_000, np.uint8), 0.2)


def test_a_run_with_staging_trains_and_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chain, "remote_backend", lambda settings: "staged")
    system = System(tmp_path).start_all()
    summary = system.wait()
    assert summary["status"] == "finished" and summary["accounting"]["holds"] is True


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_an_actor_without_a_gpu_cannot_push_to_one():
    hosted, settings = StoreServer("127.0.0.1", b"s").start(), CommSettings(link="nccl")
    relay = StoreFleet.join(hosted.address, "relay", 0, b"s", {"segment": ""}, settings)
    actor = StoreFleet.join(hosted.address, "actor", 0, b"s", {}, settings)
    tensors = {"w": torch.zeros(3)}
    publisher = WeightPublisher(actor, Layout.of(tensors, "float32"), settings).start()
    for close in (hosted.close, relay.leave, actor.leave, publisher.close):
        at_end(close)
    with waiting("the publisher", "its end", 60) as wait:
        wait.until(lambda: publisher.failure)
    with pytest.raises(SettingError, match=r"comm\.link: nccl needs a GPU at both ends"):
        publisher.publish(1, tensors)
