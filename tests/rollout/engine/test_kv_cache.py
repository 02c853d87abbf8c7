"""The pool of pages: owners, ranges, and no lost page."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rollout.engine.page_pool import PagePool


def test_private_pages_come_from_the_low_end_and_shared_ones_from_the_high_end():
    pool = PagePool(10, 16)
    assert [pool.take(), pool.take(), pool.take(is_shared=True)] == [1, 2, 9]
    pool.give_back([1])
    assert pool.take() == 1


def test_a_page_is_free_when_its_last_owner_gives_it_back():
    pool = PagePool(4, 16)
    page = pool.take(is_shared=True)
    pool.share([page])
    pool.give_back([page])
    assert pool.num_free == 2
    pool.give_back([page])
    assert pool.num_free == 3


def test_the_check_finds_a_lost_page():
    pool = PagePool(4, 16)
    page = pool.take()
    pool.check([[page]])
    with pytest.raises(AssertionError, match="other owners"):
        pool.check([])


@given(st.lists(st.integers(0, 5), max_size=60))
def test_pages_are_never_lost_or_given_twice(actions):
    pool = PagePool(8, 4)
    owners: list[list[int]] = []
    for action in actions:
        if action <= 2 and pool.num_free:
            owners.append([pool.take(is_shared=action == 0)])
        elif action == 3 and owners:
            pool.share(owners[0])
            owners.append(list(owners[0]))
        elif owners:
            pool.give_back(owners.pop(action % len(owners)))
        pool.check(owners)
