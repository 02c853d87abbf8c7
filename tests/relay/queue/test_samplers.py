"""Samplers return some of the candidates, each at most once, and no more than fit."""

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
    items = [item(order, num_tokens=tokens) for order, tokens in enumerate([6, 5, 4, 3])]
    first = TokenBalanced(2).sample(items, EVERYTHING)
    assert sum(i.num_tokens for i in first) == 9


def test_of_parts_that_cannot_be_equal_the_heaviest_goes_out_first():
    items = [item(order, num_tokens=tokens) for order, tokens in enumerate([2, 9, 1])]
    assert [i.num_tokens for i in TokenBalanced(2).sample(items, EVERYTHING)] == [9]
