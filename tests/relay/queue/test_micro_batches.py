"""Shares of nearly equal sums."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.relay.queue.micro_batches import balanced


@given(sizes=st.lists(st.integers(1, 1000), max_size=40), num_parts=st.integers(1, 8))
def test_everything_is_in_one_part_and_parts_differ_by_no_more_than_the_smallest_item(sizes: list[int], num_parts: int):
    parts = sorted(balanced(sizes, num_parts), key=lambda part: sum(sizes[i] for i in part))
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in part) for part in parts]
    smallest = min((sizes[i] for i in parts[-1]), default=0)
    assert loads[-1] - smallest <= loads[0]
