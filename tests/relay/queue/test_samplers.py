"""Samplers return some of what is offered, each at most once, no more than fits; shares are as equal as they can be made."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.messages import GroupId
from headrace.relay.queue.samplers import (
    Budget,
    Candidate,
    Fifo,
    Sampler,
    TokenBalanced,
    balanced,
)


def item(order: int, version: int = 0, num_tokens: int = 10, num_missing: int = 0) -> Candidate:
    return Candidate(GroupId(0, order), (0, 1), order, version, num_tokens, (0.0, 1.0), num_missing)


EVERYTHING = Budget(items=100, tokens=10**9, step=3)
SAMPLERS = [Fifo(), TokenBalanced(3)]
items_ = st.lists(
    st.builds(item, st.integers(0, 50), st.integers(0, 3), st.integers(1, 40), st.integers(0, 2)),
    unique_by=lambda i: i.lease_order,
    max_size=12,
)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
@given(items=items_, places=st.integers(0, 6), tokens=st.integers(1, 100))
def test_every_sampler_keeps_the_contract(sampler: Sampler, items: list[Candidate], places: int, tokens: int):
    chosen = sampler.sample(items, Budget(places, tokens, step=3))
    assert set(chosen) <= set(items) and len(set(chosen)) == len(chosen) <= places
    assert sum(i.num_tokens for i in chosen) <= tokens or len(chosen) == 1
    assert list(chosen) == list(sampler.sample(items, Budget(places, tokens, step=3)))


def test_the_oldest_goes_first_whatever_its_version():
    assert [i.lease_order for i in Fifo().sample([item(3, 0), item(1, 2), item(2, 1)], EVERYTHING)] == [1, 2, 3]


def test_consumers_that_ask_in_turn_get_equal_shares():
    items = [item(order, num_tokens=tokens) for order, tokens in enumerate([6, 5, 4, 3, 2])]
    first = TokenBalanced(2).sample(items, EVERYTHING)
    assert sum(i.num_tokens for i in first) == 10


sizes_ = st.lists(st.integers(1, 1000), max_size=40)


def loads(parts: list[list[int]], sizes: list[int]) -> list[int]:
    return [sum(sizes[i] for i in part) for part in parts]


def greedy(sizes: list[int], num_parts: int) -> int:
    sums = [0] * num_parts
    for size in sorted(sizes, reverse=True):
        sums[sums.index(min(sums))] += size
    return max(sums)


@given(sizes=sizes_, num_parts=st.integers(1, 8))
def test_everything_is_in_one_part_and_no_part_is_heavier_than_greedily_dealt(sizes: list[int], num_parts: int):
    parts = balanced(sizes, num_parts)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    assert max(loads(parts, sizes)) <= greedy(sizes, num_parts)


def test_differencing_finds_what_greed_misses():
    sizes = [8, 7, 6, 5, 4]
    assert greedy(sizes, 2) == 17 and max(loads(balanced(sizes, 2), sizes)) == 16
