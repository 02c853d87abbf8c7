"""The trainer's memory of published versions: what leaves is not written, what waits is superseded, what is lost comes again."""

from contextlib import closing

import numpy as np
import pytest
import torch

from headrace.relay.weights.byte_ranges import GRID_BYTES
from headrace.relay.weights.layout import Layout, WeightShard
from headrace.relay.weights.publisher import PublishedVersions

NUM_FLOATS = 3 * GRID_BYTES // 4


def tensors(version):
    return {"w": torch.full((NUM_FLOATS,), float(version))}


LAYOUT = Layout.of(tensors(0), "float32")


@pytest.fixture
def published():
    versions = PublishedVersions(WeightShard.whole(LAYOUT), incarnation=1)
    yield versions
    versions.close()


def digest(version):
    buffer = np.zeros(LAYOUT.num_bytes, np.uint8)
    LAYOUT.write(tensors(version), buffer)
    return LAYOUT.digest(buffer)


def test_a_version_that_leaves_is_not_written_and_of_those_that_wait_the_newest_is_next(published):
    published.write(1, tensors(1))
    with closing(published.next_source(-1, 1)) as leaving:
        for version in (2, 3, 4):
            published.write(version, tensors(version))
            assert leaving.offer.version == 1 and leaving.digest(60) == digest(1)
    with closing(published.next_source(1, 1)) as source:
        assert source.offer.version == 4 and source.digest(60) == digest(4)
        assert np.shares_memory(source.buffer, published._buffers[source.offer.slot])
    assert published.segment.num_slots == 2


def test_a_trainer_that_is_slower_than_its_relay_has_one_copy_of_its_weights(published):
    for version in (1, 2, 3):
        published.write(version, tensors(version))
        with closing(published.next_source(version - 1, 1)) as source:
            assert source.offer.version == version
        assert published.next_source(version, 0) is None
    assert published.segment.num_slots == 1


def test_the_next_head_is_offered_the_version_that_the_one_before_had(published):
    published.write(1, tensors(1))
    published.next_source(-1, 1).close()
    assert published.next_source(1, 0) is None
    with closing(published.next_source(-1, 0)) as source:
        assert source.offer.version == 1 and source.digest(60) == digest(1)


def test_a_digest_that_takes_long_is_computed_in_turns(published):
    published.write(1, tensors(1))
    with closing(published.next_source(-1, 1)) as source:
        assert [source.digest(-1) for _ in range(3)] == [None] * 3
        assert source.digest(-1) == digest(1)
