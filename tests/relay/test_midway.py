"""Where a rollout takes new weights in the middle of its trajectories: only where nothing else helps a trainer that starves."""

import pytest

from headrace.comm.messages import LoadReport
from headrace.relay.midway import STARVED, takes_midway


def load(
    version: int = 3, running: int = 4, waiting: int = 0, at_tools: int = 0, peak: int = 10, bound: int = 9
) -> LoadReport:
    return LoadReport(
        version=version, num_running=running, num_waiting=waiting, kv_util=0.0, tokens=0, busy_s=1.0, idle_s=0.0,
        pull_s=0.0, num_at_tools=at_tools, peak_running=peak, batch_bound=bound,
    )  # fmt: skip


def is_due(own: LoadReport, *others: LoadReport, newest: int = 4, starved_share: float = 0.1) -> bool:
    return takes_midway(own, others, newest, starved_share)


def test_a_rollout_that_decodes_few_trajectories_alone_on_its_version_takes_new_weights_while_the_trainer_starves():
    assert is_due(load()) and is_due(load(), load(version=2), load(version=4, running=9))


@pytest.mark.parametrize("share", [0.0, STARVED])
def test_it_keeps_its_version_while_the_trainer_has_work(share: float):
    assert not is_due(load(), starved_share=share)


def test_it_keeps_the_newest_version():
    assert not is_due(load(version=4)) and not is_due(load(version=5))


@pytest.mark.parametrize(("running", "expected"), [(4, True), (5, False), (10, False)])
def test_it_keeps_its_version_while_it_decodes_half_of_its_peak(running: int, expected: bool):
    assert is_due(load(running=running)) == expected


def test_it_keeps_its_version_while_another_rollout_works_on_it_which_repack_moves_its_trajectories_to():
    assert not is_due(load(), load(running=1))
    assert is_due(load(), load(running=0)), "the other one has nothing left"


def test_beside_others_of_its_version_it_takes_new_weights_where_either_side_cannot_move_trajectories():
    assert is_due(load(bound=0), load()) and is_due(load(), load(bound=0))
    assert not is_due(load(), load(bound=0), load())


@pytest.mark.parametrize(
    ("running", "waiting", "at_tools", "expected"), [(2, 0, 2, True), (2, 1, 2, False), (0, 0, 9, True)]
)
def test_beside_others_of_its_version_it_takes_new_weights_where_half_of_its_trajectories_wait_for_tools(
    running: int, waiting: int, at_tools: int, expected: bool
):
    assert is_due(load(running=running, waiting=waiting, at_tools=at_tools), load()) == expected


def test_an_empty_rollout_needs_no_order():
    assert not is_due(load(running=0))
