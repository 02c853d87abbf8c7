"""Pinned host memory: registrations end with the memory, by a runtime that stands for CUDA's."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headrace.comm import shared_memory
from headrace.comm.shared_memory import Segment, host_buffer, pin
from headrace.relay.weights.slots import VersionSlots

REFUSED = 712


class Runtime:
    """Of CUDA's runtime the registrations: by address, refused where one is already, or where `is_full`."""

    def __init__(self):
        self.registered: dict[int, int] = {}
        self.is_full = False
        self.cleared: list[bool] = []

    def cudaHostRegister(self, address, num_bytes, flags):
        if self.is_full or address in self.registered:
            return REFUSED
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address):
        return 0 if self.registered.pop(address, 0) else REFUSED


@pytest.fixture
def runtime(monkeypatch):
    found = Runtime()
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: True, cudart=lambda: found))
    monkeypatch.setattr(shared_memory, "_clear_error", lambda: found.cleared.append(True))
    return found


@pytest.fixture
def segment():
    segment = Segment.create_anonymous()
    yield segment
    segment.close()


def test_slots_are_registered_once_and_until_their_segment_is_closed(runtime, segment):
    VersionSlots(segment).prepare(5000, 1)
    slots = VersionSlots(Segment.open(segment.path))
    slots.pin()
    slots.pin()
    assert [*runtime.registered.values()] == [5000] * 3
    slots.segment.close()
    del slots
    gc.collect()
    assert not runtime.registered and not runtime.cleared


def test_a_host_buffer_is_registered_while_it_or_a_view_of_it_lives(runtime):
    buffer = host_buffer(3 << 20)
    assert runtime.registered == {buffer.ctypes.data: 3 << 20} and not buffer.any()
    view = torch.from_numpy(buffer[10:])
    del buffer
    gc.collect()
    assert runtime.registered
    del view
    gc.collect()
    assert not runtime.registered


def test_a_refusal_is_told_and_its_error_is_taken_off_the_thread(runtime, caplog):
    runtime.is_full = True
    assert not host_buffer(5000).any()
    assert len(runtime.cleared) == 1 and "does not pin 5000 bytes" in caplog.text
    gc.collect()
    assert len(runtime.cleared) == 1
    shared_memory._unpin(1)
    assert len(runtime.cleared) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_without_a_gpu_nothing_is_registered():
    assert not pin(np.zeros(10, np.uint8))
    assert host_buffer(10).tolist() == [0] * 10
