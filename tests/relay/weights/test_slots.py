"""Versions in the slots of a segment: none is read torn, and no reader waits for a writer."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from headrace.comm.errors import WrongDigest
from headrace.comm.shared_memory import Lock, Segment
from headrace.comm.waits import waiting
from headrace.relay.weights.byte_ranges import digest
from headrace.relay.weights.slots import StoredVersion, VersionNotAvailable, VersionSlots, choose_slot

NUM_BYTES = 300_000
PATIENCE_S = 60.0


@pytest.fixture
def version_slots():
    slots = VersionSlots(Segment.create_anonymous())
    slots.prepare(NUM_BYTES, fingerprint=11)
    yield slots
    slots.segment.close()


@pytest.fixture
def reader(version_slots):
    reader = VersionSlots(Segment.open(version_slots.segment.path))
    yield reader
    reader.segment.close()


def put(version_slots, version, force=False):
    arriving = version_slots.begin(version, force=force)
    buffer = version_slots.segment.slot(arriving.slot)
    buffer[:] = version % 251
    version_slots.commit(arriving, digest(buffer))


def taken(reader, version=None):
    into = np.zeros(NUM_BYTES, np.uint8)
    held, _ = reader.read_with(lambda source: np.copyto(into, source), version)
    assert digest(into) == held.digest
    return held.version, int(into[0])


def test_nothing_is_readable_before_the_first_version(reader):
    assert reader.newest() is None
    with pytest.raises(VersionNotAvailable):
        reader.read_with(np.copy)


def test_a_version_is_readable_from_its_completion_on(version_slots, reader):
    arriving = version_slots.begin(1)
    assert reader.newest() is None
    buffer = version_slots.segment.slot(arriving.slot)
    buffer[:] = 1
    version_slots.commit(arriving, digest(buffer))
    assert reader.newest() == 1
    assert taken(reader)[0] == 1


def test_the_last_two_versions_are_readable_while_the_next_arrives(version_slots, reader):
    for version in range(1, 8):
        put(version_slots, version)
    version_slots.begin(8)
    assert [held.version for held in reader.complete_versions()] == [6, 7]
    assert taken(reader, 6) == (6, 6)
    assert taken(reader) == (7, 7)
    with pytest.raises(VersionNotAvailable, match="version 5"):
        taken(reader, 5)


def test_an_abandoned_version_is_never_readable(version_slots, reader):
    put(version_slots, 1)
    version_slots.abort(version_slots.begin(2))
    put(version_slots, 3)
    assert [held.version for held in reader.complete_versions()] == [1, 3]


def test_an_older_version_that_completes_late_is_not_the_newest(version_slots, reader):
    put(version_slots, 5)
    put(version_slots, 4)
    assert taken(reader)[0] == 5
    assert taken(reader, 4)[0] == 4


def test_a_locked_slot_is_not_chosen(version_slots, reader):
    put(version_slots, 1)
    put(version_slots, 2)
    old = reader.find(1)
    assert reader.segment.try_lock(old.slot, Lock.SHARED)
    for version in range(3, 7):
        put(version_slots, version)
    assert reader.is_valid(old)
    assert taken(reader, 1)[0] == 1


def test_a_slot_that_is_taken_from_a_frozen_reader_shows_that_its_copy_is_torn(version_slots, reader):
    for version in (1, 2, 3):
        put(version_slots, version)
    locked = [held for held in reader.complete_versions() if held.version < 3]
    assert all(reader.segment.try_lock(held.slot, Lock.SHARED) for held in locked)
    assert version_slots.begin(4) is None
    put(version_slots, 4, force=True)
    assert [reader.is_valid(held) for held in locked] == [False, True]
    assert taken(reader)[0] == 4


def test_slots_are_for_one_layout(version_slots):
    version_slots.prepare(NUM_BYTES, fingerprint=11)
    with pytest.raises(WrongDigest, match="^the memory has slots of another layout: .*model.dtype"):
        version_slots.prepare(NUM_BYTES, fingerprint=12)


def test_a_new_process_finds_the_versions_of_the_one_before(version_slots):
    put(version_slots, 1)
    put(version_slots, 2)
    version_slots.begin(3)
    successor = VersionSlots(Segment.open(version_slots.segment.path))
    version_slots.segment.close()
    successor.prepare(NUM_BYTES, fingerprint=11)
    put(successor, 3)
    assert taken(successor)[0] == 3
    successor.segment.close()


def test_the_slot_chosen_is_empty_or_the_oldest_and_never_the_newest():
    held = [StoredVersion(4, "", 0, 2), StoredVersion(6, "", 1, 2), StoredVersion(5, "", 2, 2)]
    assert choose_slot(held, 1, [False] * 3) == 0
    assert choose_slot(held, 1, [True, False, False]) == 2
    assert choose_slot(held, 1, [True, False, True]) is None
    assert choose_slot([held[0], None, held[2]], 2, [False] * 3) == 1


def test_no_reading_is_ever_torn_while_versions_are_written_without_pause(version_slots):
    stop, seen, failures = threading.Event(), set(), []

    def read():
        reader, into = VersionSlots(Segment.open(version_slots.segment.path)), np.zeros(NUM_BYTES, np.uint8)
        while not stop.is_set():
            held, _ = reader.read_with(lambda source: np.copyto(into, source))
            if not (into == held.version % 251).all() or digest(into) != held.digest:
                failures.append(held)
            seen.add(held.version)
        reader.segment.close()

    put(version_slots, 1)
    with ThreadPoolExecutor(3) as pool, waiting("the readers", "versions", PATIENCE_S) as wait:
        reading = [pool.submit(read) for _ in range(3)]
        try:
            version = 1
            while version < 1000 or len(seen) < 50:
                wait.check()
                version += 1
                put(version_slots, version, force=True)
        finally:
            stop.set()
        for done in reading:
            done.result()
    assert not failures


def test_a_version_that_is_kept_is_the_newest_and_the_others_are_given_up(version_slots):
    for version in (4, 5, 6):
        put(version_slots, version)
    kept = version_slots.find(5)
    version_slots.keep(kept)
    assert version_slots.complete_versions() == [kept] and version_slots.newest() == 5
    put(version_slots, 6)
    assert [held.version for held in version_slots.complete_versions()] == [5, 6] and version_slots.newest() == 6
    version_slots.keep(None)
    assert version_slots.complete_versions() == [] and version_slots.newest() is None
    put(version_slots, 2)
    assert version_slots.newest() == 2


def test_freed_slots_can_be_prepared_again(version_slots):
    put(version_slots, 4)
    version_slots.free()
    assert version_slots.fingerprint == 0 and version_slots.newest() is None
    version_slots.prepare(NUM_BYTES, fingerprint=12)
    assert version_slots.newest() is None
    put(version_slots, 1)
    assert version_slots.newest() == 1
