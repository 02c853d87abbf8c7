import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.errors import PeerGone, StorageFull
from headrace.comm.storage import arena as module
from headrace.comm.storage.arena import Arena, ArenaFile


@pytest.fixture
def arena():
    arena = Arena(1 << 30)
    yield arena
    arena.close()


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=60))
def test_places_in_use_never_overlap_and_all_comes_back(steps):
    arena, held = Arena(1 << 30), []
    for takes, number in steps:
        if takes or not held:
            held.append((arena.reserve(number), number))
        else:
            arena.free(*held.pop(number % len(held)))
        ends = sorted((place, place + size) for place, size in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        assert arena.num_bytes >= sum(size for _, size in held)
    for place, size in held:
        arena.free(place, size)
    assert arena.num_bytes == 0
    assert arena.reserve(1) == module.MAGIC_BYTES
    arena.close()


def test_what_comes_back_is_given_out_before_more_memory_is_taken(arena):
    places = [arena.reserve(1000) for _ in range(3)]
    arena.free(places[0], 1000)
    arena.free(places[1], 1000)
    assert arena.reserve(2000) == places[0]


def test_memory_goes_back_to_the_host_but_for_a_spare(arena, monkeypatch):
    monkeypatch.setattr(module, "_SPARE_BYTES", 1 << 20)
    size = 8 << 20
    kept, place = arena.reserve(100), arena.reserve(size)
    arena.write(kept, [np.full(100, 7, np.uint8)])
    arena.write(place, [np.ones(size, np.uint8)])
    assert arena.resident_bytes >= size
    arena.free(place, size)
    assert arena.resident_bytes <= 2 << 20
    read = np.empty(100, np.uint8)
    arena.read(kept, read)
    assert (read == 7).all()


def test_more_buffers_than_one_call_takes_are_written_in_order(arena):
    buffers = [np.full(i % 5, i % 251, np.uint8) for i in range(3000)]
    place = arena.reserve(sum(buffer.nbytes for buffer in buffers))
    arena.write(place, buffers)
    read = np.empty(sum(buffer.nbytes for buffer in buffers), np.uint8)
    arena.read(place, read)
    assert np.array_equal(read, np.concatenate(buffers))


def test_an_arena_has_a_bound(arena):
    with pytest.raises(StorageFull, match=r"queue\.capacity"):
        arena.reserve(1 << 30)


def test_another_opening_sees_the_bytes_and_a_stranger_is_not_taken_for_it(arena):
    other = ArenaFile.begin_receive(arena.path, arena.magic)
    place = arena.reserve(4)
    other.write(place, [np.arange(4, dtype=np.uint8)])
    read = np.empty(4, np.uint8)
    arena.read(place, read)
    assert read.tolist() == [0, 1, 2, 3]
    other.close()
    with pytest.raises(PeerGone, match="another arena"):
        ArenaFile.begin_receive(arena.path, bytes(module.MAGIC_BYTES))
    with pytest.raises(PeerGone, match="no arena"):
        ArenaFile.begin_receive("/proc/self/fd/99999", arena.magic)
