"""Samples that a reward function compares within a group wait for each other."""

from headrace.comm.messages import GroupId
from headrace.rollout.engine.sequence import Completion
from headrace.rollout.leased_row import LeasedRow
from headrace.rollout.scoring import WholeGroups

DONE = Completion(1, [0], [0], [0.0], "stop")


def test_a_group_is_scored_once_all_its_samples_here_are_finished_and_without_those_whose_lease_is_gone():
    rows = [LeasedRow(GroupId(0, 5).row(sample), 1, 0, {}) for sample in range(3)]
    held = {row.row_id.number: row for row in rows}
    groups = WholeGroups(held)
    for sample in (1, 0):
        rows[sample].completion = DONE
        groups.add(rows[sample])
        assert groups.complete() == []
    del held[rows[1].row_id.number]
    rows[2].completion = DONE
    groups.add(rows[2])
    assert groups.complete() == [[rows[0], rows[2]]]
    assert groups.complete() == []
