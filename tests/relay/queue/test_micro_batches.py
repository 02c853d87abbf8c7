"""Shares of nearly equal sums, and micro-batches of rows that share their prompts."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.messages import GroupId
from headrace.comm.messages.queue import GroupRef, RowRef
from headrace.relay.queue.micro_batches import LEAST_RATIO, SHORTEST_PREFIX, balanced, rounds, tree_rounds


@given(sizes=st.lists(st.integers(1, 1000), max_size=40), num_parts=st.integers(1, 8))
def test_everything_is_in_one_part_and_parts_differ_by_no_more_than_the_smallest_item(sizes: list[int], num_parts: int):
    parts = sorted(balanced(sizes, num_parts), key=lambda part: sum(sizes[i] for i in part))
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in part) for part in parts]
    smallest = min((sizes[i] for i in parts[-1]), default=0)
    assert loads[-1] - smallest <= loads[0]


def group_rows(number: int, prompt: int, responses: list[int]) -> list[RowRef]:
    same = [0] * len(responses)
    units = [["relay-0#1"]] * len(responses)
    lengths = [prompt + response for response in responses]
    return GroupRef(
        GroupId(0, number), [*range(len(responses))], same, units, same, lengths, [0.0] * len(responses), prompt
    ).rows()


GROUPS = st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(1, 20), min_size=1, max_size=6)), max_size=8)


def computed(part: list[RowRef]) -> int:
    """Tokens of a micro-batch that are computed, by `tree_rounds`'s rule."""
    num_tokens = sum(row.num_tokens for row in part)
    prompts = [
        [row.num_prompt_tokens for row in part if row.row.group == group] for group in {r.row.group for r in part}
    ]
    repeated = sum(sum(same) - same[0] for same in prompts if same[0] >= SHORTEST_PREFIX)
    return num_tokens if num_tokens < LEAST_RATIO * (num_tokens - repeated) else num_tokens - repeated


@given(groups=GROUPS, num_ranks=st.integers(1, 4), budget=st.integers(10, 90))
def test_every_row_is_in_one_micro_batch_of_at_most_the_budget_in_computed_tokens(
    groups: list[tuple[int, list[int]]], num_ranks: int, budget: int
):
    rows = [row for number, group in enumerate(groups) for row in group_rows(number, *group)]
    planned = tree_rounds(rows, num_ranks, budget, longest_in_tree=1000)
    assert all(len(parts) == num_ranks for parts in planned)
    assert sorted(row.key for parts in planned for part in parts for row in part) == sorted(row.key for row in rows)
    assert all(computed(part) <= budget or len(part) == 1 for parts in planned for part in parts)
    assert planned == tree_rounds(rows, num_ranks, budget, longest_in_tree=1000)


def test_a_group_that_fits_stays_whole_and_shares_of_ranks_are_even_in_computed_tokens():
    rows = [row for number in range(4) for row in group_rows(number, 40, [10, 12, 8, 10])]
    planned = tree_rounds(rows, 2, 200, longest_in_tree=1000)
    assert [[sorted({row.row.prompt for row in part}) for part in parts] for parts in planned] == [[[0, 2], [1, 3]]]
    assert len(rounds(rows, 2, 200)) == 3


def test_a_group_is_divided_where_one_rank_would_wait_for_another():
    rows = group_rows(0, 8, [40, 40, 40, 40])
    ((first, second),) = tree_rounds(rows, 2, 1000, longest_in_tree=1000)
    assert len(first) == len(second) == 2
    ((first, second),) = tree_rounds(group_rows(0, 400, [2, 2]), 2, 1000, longest_in_tree=1000)
    assert sorted(map(len, (first, second))) == [0, 2], "each half would take as long as the whole"


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("num_groups", [1, 2, 3, 4, 5, 6, 9, 16])
@pytest.mark.parametrize("prompt", [46, 400])
def test_groups_that_tie_leave_no_rank_idle_that_rows_alone_would_use(num_ranks: int, num_groups: int, prompt: int):
    """In computed tokens the heaviest rank has at most a sixteenth more than if rows were dealt out alone."""
    rng = Random(num_groups)
    rows = [
        row
        for number in range(num_groups)
        for row in group_rows(number, prompt, [rng.randint(98, 102) for _ in range(8)])
    ]
    loads = [
        max(sum(computed(parts[rank]) for parts in planned) for rank in range(num_ranks))
        for planned in (tree_rounds(rows, num_ranks, 8192, 8192), rounds(rows, num_ranks, 8192))
    ]
    assert 15 * loads[0] <= 16 * loads[1], loads


def test_a_row_that_is_too_long_for_a_tree_makes_all_be_planned_alone():
    rows = group_rows(0, 40, [10, 12, 8, 30])
    assert tree_rounds(rows, 1, 120, longest_in_tree=69) == rounds(rows, 1, 120)
    assert tree_rounds(rows, 1, 120, longest_in_tree=0) == rounds(rows, 1, 120)
    assert len(tree_rounds(rows, 1, 120, longest_in_tree=70)) < len(rounds(rows, 1, 120))


def test_groups_that_share_nothing_are_planned_as_rows_alone():
    rows = [row for number in range(5) for row in group_rows(number, SHORTEST_PREFIX - 1, [30, 20, 10])]
    assert tree_rounds(rows, 2, 60, longest_in_tree=1000) == rounds(rows, 2, 60)
