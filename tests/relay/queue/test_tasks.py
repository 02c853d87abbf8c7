"""The shares of the consumers of a task, which ask one by one."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.messages import GroupId
from headrace.relay.journal.records import Group, Row
from headrace.relay.queue.tasks import equal_share, group_ref_of


@given(sizes=st.lists(st.integers(1, 40), max_size=12), num_consumers=st.integers(1, 4), tokens=st.integers(1, 100))
def test_a_share_has_items_in_order_each_once_and_no_more_than_fit(sizes: list[int], num_consumers: int, tokens: int):
    share = equal_share(sizes, num_consumers, tokens)
    assert share == sorted(set(share)) and set(share) <= {*range(len(sizes))}
    assert sum(sizes[index] for index in share) <= tokens or len(share) == 1
    assert bool(share) == bool(sizes)


def test_one_consumer_gets_the_first_items_up_to_one_that_does_not_fit():
    assert equal_share([10, 20, 50, 1], 1, 40) == [0, 1]


def test_a_prompt_that_items_share_counts_once_toward_the_tokens_that_fit():
    prompts = [(0, 10)] * 4 + [(1, 10)] * 2
    assert equal_share([12] * 6, 1, 29, prompts) == [0, 1, 2, 3]
    assert equal_share([12] * 6, 1, 31, prompts) == [0, 1, 2, 3, 4]
    assert equal_share([12] * 6, 1, 31, [(group, 0) for group, _ in prompts]) == [0, 1]


def test_consumers_that_ask_in_turn_get_equal_shares():
    assert sum([6, 5, 4, 3][index] for index in equal_share([6, 5, 4, 3], 2, 1000)) == 9


def test_of_parts_that_cannot_be_equal_the_heaviest_goes_out_first():
    assert equal_share([2, 9, 1], 2, 1000) == [1]


def test_samples_share_a_prompt_only_if_each_of_them_has_it():
    group = Group(GroupId(0, 3), 0, [Row(num_tokens=9, num_prompt_tokens=size) for size in (5, 5, 0, 4)])
    found = [group_ref_of(group, samples).num_prompt_tokens for samples in ([0, 1], [1, 2], [0, 3], [])]
    assert found == [5, 0, 0, 0]
