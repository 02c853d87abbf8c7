"""The pool of pages: owners, ranges, and no lost page; copies of pages."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.rollout.engine.kv_cache import KVCache
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


class DispatchCount(TorchDispatchMode):
    """The names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def hold(pool, *digests):
    """Pages of a sequence that can be found by these digests."""
    pages = [pool.take() for _ in digests]
    for page, digest in zip(pages, digests, strict=True):
        pool.register(page, digest)
    return pages


def test_a_page_without_an_owner_is_found_until_a_newer_one_needs_it():
    pool = PagePool(5, 16, max_kept=5, in_ranges=False)
    pool.give_back(hold(pool, b"a", b"ab"))
    pool.give_back(hold(pool, b"b"))
    assert pool.num_free == 4
    found = pool.find(b"a", is_shared=False)
    assert found is not None and pool.find(b"c", is_shared=False) is None
    pool.give_back([found])
    taken = [pool.take(), pool.take()]
    pool.check([taken])
    assert pool.find(b"ab", is_shared=False) is None, "the end of the oldest sequence goes first"
    owners = [taken, *([pool.find(digest, is_shared=False)] for digest in (b"b", b"a"))]
    pool.check(owners)
    assert pool.num_free == 0 and not pool.take_copies()


def test_kept_pages_make_way_for_ranges_by_a_copy_and_keep_their_age():
    pool = PagePool(8, 16, max_kept=8)
    pool.give_back(hold(pool, b"a", b"ab"))
    taken = [pool.take(), pool.take(is_shared=True)]
    assert taken == [1, 7] and pool.take_copies() == [(1, 4)]
    more = [pool.take() for _ in range(5)]
    assert more[0] == 2 and pool.find(b"ab", is_shared=False) is None
    pool.check([taken, more])
    assert pool.num_free == 0 and pool.find(b"a", is_shared=False) is None


def test_a_pool_keeps_no_more_pages_than_it_may_and_none_after_it_forgets():
    pool = PagePool(9, 16, max_kept=2)
    pool.give_back(hold(pool, b"a", b"ab", b"abc"))
    held = hold(pool, b"d")
    pool.check([held])
    assert pool.find(b"abc", is_shared=False) is None, "the third page is not kept"
    pool.forget()
    pool.check([held])
    assert [pool.find(digest, is_shared=False) for digest in (b"a", b"ab", b"d")] == [None] * 3


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_copies_of_pages_have_the_result_of_one_after_the_other(copies):
    cache = KVCache(2, (7, 1, 4, 2), torch.float32, "cpu")
    expected = list(range(7))
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.arange(7.0)[:, None, None, None].expand_as(tensor))
    for source, target in copies:
        expected[target] = expected[source]
    cache.copy_pages(copies)
    for tensor in (*cache.keys, *cache.values):
        assert tensor.flatten(1).unique(dim=1)[:, 0].tolist() == expected


def test_forks_of_a_group_are_copied_together():
    cache = KVCache(3, (9, 1, 4, 2), torch.float32, "cpu")
    with DispatchCount() as count:
        cache.copy_pages([(1, target) for target in range(2, 9)])
    assert count.names.count("index_copy_") == 6 and "copy_" not in count.names


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
