"""The arena: reserved ranges never overlap, freed memory is reused, and the capacity follows the container."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.errors import StorageFull
from headrace.comm.memfd import HEAD_BYTES, open_memory
from headrace.comm.storage import arena as module
from headrace.comm.storage.arena import Arena, ArenaFile, memory_limit


@pytest.fixture
def arena():
    arena = Arena(1 << 30)
    yield arena
    arena.close()


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=60))
def test_reserved_ranges_never_overlap_and_all_memory_can_be_freed(steps):
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
    assert arena.reserve(1) == HEAD_BYTES
    arena.close()


def test_freed_memory_is_reused_before_more_is_taken(arena):
    places = [arena.reserve(1000) for _ in range(3)]
    arena.free(places[0], 1000)
    arena.free(places[1], 1000)
    assert arena.reserve(2000) == places[0]


def test_freed_memory_goes_back_to_the_host_except_for_a_spare(arena, monkeypatch):
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


def test_a_full_arena_names_the_setting(arena):
    with pytest.raises(StorageFull, match=r"queue\.lead"):
        arena.reserve(1 << 30)


def test_another_descriptor_sees_the_bytes(arena):
    other = ArenaFile(open_memory(arena.path))
    place = arena.reserve(4)
    other.write(place, [np.arange(4, dtype=np.uint8)])
    read = np.empty(4, np.uint8)
    arena.read(place, read)
    assert read.tolist() == [0, 1, 2, 3]
    other.close()


def control_groups(root: Path, membership: str, limits: dict[str, str]) -> Path:
    """A root directory with a process's control groups and their limits."""
    for path, text in {"proc/self/cgroup": membership, **{f"sys/fs/cgroup/{k}": v for k, v in limits.items()}}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "4096\n"}, 4096),
        ("0::/job/step\n", {"job/memory.max": "8192\n", "job/step/memory.max": "max\n"}, 8192),
        ("5:cpu:/a\n4:memory:/docker/x\n", {"memory/memory.limit_in_bytes": "4096\n", "memory.max": "1\n"}, 4096),
        (
            "4:memory,hugetlb:/a\n0::/b\n",
            {"memory/a/memory.limit_in_bytes": "9223372036854771712\n", "b/memory.max": "512\n"},
            512,
        ),
    ],
    ids=["container", "nested", "version 1", "both versions"],
)
def test_the_least_limit_of_the_control_groups_binds(
    tmp_path: Path, membership: str, limits: dict[str, str], expected: int
):
    assert memory_limit(control_groups(tmp_path, membership, limits)) == expected


def test_without_a_limit_the_host_binds(tmp_path: Path):
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    unlimited = control_groups(tmp_path / "group", "0::/\n", {"memory.max": "max\n"})
    assert memory_limit(tmp_path) == memory_limit(unlimited) == host
