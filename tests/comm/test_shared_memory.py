"""Segments of shared memory: several openings, locks of live and dead processes, and the lifetime of the bytes."""

import os
import subprocess
import sys

import numpy as np
import pytest

from headrace.comm import shared_memory
from headrace.comm.environment import SEGMENT_FD
from headrace.comm.errors import PeerGone
from headrace.comm.shared_memory import Lock, Segment


@pytest.fixture
def segment():
    segment = Segment.create_anonymous()
    segment.allocate(3, 10_000)
    yield segment
    segment.close()


def test_bytes_written_through_one_opening_are_read_through_another(segment):
    other = Segment.open(segment.path)
    segment.slot(1)[:] = 7
    segment.words[5] = -3
    assert other.slot_bytes == 10_000 and other.num_slots == 3
    assert (other.slot(1) == 7).all() and not other.slot(0).any() and not other.slot(2).any()
    assert other.words[5] == -3
    other.close()


def test_an_opening_made_before_the_slots_are_allocated_sees_them_later():
    segment = Segment.create_anonymous()
    other = Segment.open(segment.path)
    assert other.slot_bytes == 0
    segment.allocate(2, 100)
    segment.slot(1)[:] = 9
    assert other.slot(1).tolist() == [9] * 100
    segment.close()
    other.close()


def test_a_shared_lock_excludes_the_writer_and_an_exclusive_lock_excludes_readers(segment):
    reader, writer = Segment.open(segment.path), Segment.open(segment.path)
    assert reader.try_lock(0, Lock.SHARED) and not writer.try_lock(0, Lock.EXCLUSIVE)
    assert writer.try_lock(1, Lock.EXCLUSIVE)
    assert not reader.try_lock(1, Lock.SHARED)
    reader.unlock(0, Lock.SHARED)
    assert writer.try_lock(0, Lock.EXCLUSIVE)
    reader.close()
    writer.close()


def test_a_slot_that_one_opening_locks_twice_is_free_after_both_unlocks(segment):
    reader, writer = Segment.open(segment.path), Segment.open(segment.path)
    assert reader.try_lock(0, Lock.SHARED) and reader.try_lock(0, Lock.SHARED)
    reader.unlock(0, Lock.SHARED)
    assert not writer.try_lock(0, Lock.EXCLUSIVE)
    reader.unlock(0, Lock.SHARED)
    assert writer.try_lock(0, Lock.EXCLUSIVE)
    reader.close()
    writer.close()


READER = """
import sys
from headrace.comm.shared_memory import Lock, Segment
print(Segment.open(sys.argv[1]).try_lock(2, Lock.SHARED), flush=True)
sys.stdin.read()
"""


def test_the_lock_of_a_killed_reader_is_free_again(segment):
    command = [sys.executable, "-c", READER, segment.path]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert reader.stdout and reader.stdout.readline() == b"True\n"
    assert not segment.try_lock(2, Lock.EXCLUSIVE)
    reader.kill()
    reader.communicate()
    assert segment.try_lock(2, Lock.EXCLUSIVE)


CHILD = """
from headrace.comm.shared_memory import Segment
segment = Segment.inherited()
segment.slot(0)[:] += 1
print(segment.path, flush=True)
"""


def test_the_bytes_outlive_the_child_that_wrote_them(segment):
    supervisor_fd = int(segment.path.partition("#")[0].rsplit("/", 1)[1])
    environment = {**os.environ, SEGMENT_FD: str(supervisor_fd)}
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", CHILD],
            env=environment,
            pass_fds=[supervisor_fd],
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == segment.path
    assert (segment.slot(0) == 2).all()


def test_without_a_supervisor_the_process_holds_its_own_segment(monkeypatch):
    monkeypatch.delenv(SEGMENT_FD, raising=False)
    segment = Segment.inherited()
    other = Segment.open(segment.path)
    assert other.num_slots == 0
    other.close()
    segment.close()
    segment.close()


def test_a_segment_that_is_gone_is_named(segment):
    segment.close()
    with pytest.raises(PeerGone, match=segment.path.partition("#")[0]):
        Segment.open(segment.path)


def test_views_outlive_the_opening(segment):
    view = segment.slot(0)
    segment.close()
    view[:] = 1
    assert int(np.sum(view)) == 10_000


@pytest.mark.parametrize("advice", [shared_memory._MADV_POPULATE_WRITE, 9999])
def test_all_pages_of_the_slots_are_there_before_a_copy_whatever_the_kernel_knows(
    monkeypatch: pytest.MonkeyPatch, advice: int
):
    monkeypatch.setattr(shared_memory, "_MADV_POPULATE_WRITE", advice)
    segment = Segment.create_anonymous()
    segment.allocate(2, 1 << 20)
    assert segment.slot(0)[-1] == 0
    assert os.fstat(segment._fd).st_blocks * 512 >= 2 << 20
    segment.close()


def test_freed_slots_take_no_memory_and_can_be_written_again(segment):
    segment.slot(1)[:] = 7
    assert segment.held_bytes >= 30_000
    segment.free()
    assert segment.held_bytes <= 2 * shared_memory.HEADER_BYTES
    assert not segment.slot(1).any()
    segment.slot(2)[:] = 5
    assert (segment.slot(2) == 5).all() and segment.held_bytes >= 30_000
    empty = Segment.create_anonymous()
    empty.free()
    empty.close()


def test_a_mapping_is_populated_from_its_start_since_pages_may_be_larger_than_the_header(segment, monkeypatch):
    populated = []
    monkeypatch.setattr(shared_memory, "_populate", populated.append)
    first = segment.slot(0)
    assert [first.ctypes.data - memory.ctypes.data for memory in populated] == [shared_memory.HEADER_BYTES]
    populated.clear()  # it holds the mapping


def test_slots_that_are_added_while_the_memory_is_mapped_are_mapped_later(monkeypatch: pytest.MonkeyPatch):
    segment = Segment.create_anonymous()
    segment.allocate(1, 5000)
    monkeypatch.setattr(shared_memory, "_populate", lambda _: segment.allocate(2, 5000))
    assert [len(segment.slot(index)) for index in range(2)] == [5000, 5000]
    segment.close()
