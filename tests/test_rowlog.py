"""What a step trained on comes back as it was, in the order in which it came."""

from pathlib import Path

import numpy as np
import pytest

from headrace.comm.errors import SettingError
from headrace.comm.messages import GroupId, HandOut
from headrace.comm.queue_messages import GroupRef
from headrace.trainer.rowlog import RowLog, SavedStep


def hand_out(first: int) -> HandOut:
    group = GroupRef(GroupId(0, first), [0], [1], [["relay-0#1"]], [3], [7], [0.1])
    return HandOut(step=2, first=first, total=2, groups=[group], metrics={"queue/ready_groups": 1.0})


def test_rows_and_hand_outs_come_back(tmp_path: Path):
    rng = np.random.default_rng(0)
    rows = {f"0.{i}.0@1": {"response_ids": rng.integers(0, 9, i + 1).astype(np.int32)} for i in range(12)}
    log = RowLog(tmp_path)
    for key, columns in rows.items():
        log.add_row(key, columns)
    for first in range(12):
        log.add_hand_out(hand_out(first))
    log.write(2)
    saved = SavedStep(tmp_path, 2)
    assert list(saved.hand_outs()) == [hand_out(first) for first in range(12)]
    for key, columns in rows.items():
        assert np.array_equal(saved.fetch(key)["response_ids"], columns["response_ids"]), key


def test_each_step_has_its_own_rows(tmp_path: Path):
    log = RowLog(tmp_path)
    for step in range(2):
        log.add_row(f"0.{step}.0@1", {"x": np.array([step])})
        log.write(step)
    assert SavedStep(tmp_path, 1).fetch("0.0.0@1") == {}
    assert SavedStep(tmp_path, 1).fetch("0.1.0@1")["x"].tolist() == [1]
    assert not list(tmp_path.glob("rows/*.new"))


def test_a_run_without_rows_is_told_how_to_have_them(tmp_path: Path):
    with pytest.raises(SettingError, match=r"run\.save_rows"):
        SavedStep(tmp_path, 0)
