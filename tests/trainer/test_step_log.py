"""The run folder returns the batches of a step unchanged, so that a replay can train them again."""

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from support.small_disk import fill, small_disk

from headrace.comm import disk as disk_module
from headrace.comm.errors import SettingError
from headrace.comm.messages import GroupId, TrainBatch
from headrace.comm.messages.queue import GroupRef
from headrace.relay.checkpoints import CheckpointFolder
from headrace.relay.queue.batch import Batch
from headrace.trainer.step_log import StepLog, StepReplay


def batch_of(first: int) -> Batch:
    """A batch of two rows in micro-batches of one, and an empty micro-batch, as with several ranks."""
    group = GroupRef(GroupId(0, first), [0, 1], [1, 2], [["relay-0#1"]] * 2, [3, 3], [7, 8], [0.1, 0.2])
    row_batch = TrainBatch(step=2, first=first, total=2, groups=[group], metrics={"queue/ready": 1.0})
    early, late = group.rows()
    rng = np.random.default_rng(first)
    columns = {row.key: {"response_ids": rng.integers(0, 9, row.num_tokens)} for row in (early, late)}
    return Batch(row_batch, [[late], [early], []], columns, num_forward=2, has_trees=first % 2 == 0)


def test_batches_are_read_in_their_order_with_their_micro_batches(tmp_path: Path):
    batches = [batch_of(first) for first in range(12)]
    log = StepLog(tmp_path)
    for batch in batches:
        log.add(batch)
    log.write(2)
    found = list(StepReplay(tmp_path, 2).batches())
    assert [(b.row_batch, b.micro_batches) for b in found] == [(b.row_batch, b.micro_batches) for b in batches]
    assert [batch.num_forward for batch in found] == [2] * 12
    assert [batch.has_trees for batch in found] == [first % 2 == 0 for first in range(12)]
    for batch, again in zip(batches, found, strict=True):
        for one, other in zip(batch["response_ids"], again["response_ids"], strict=True):
            assert np.array_equal(one, other)


def test_files_of_earlier_versions_do_not_say_that_they_have_trees_and_have_none(tmp_path: Path):
    log = StepLog(tmp_path)
    log.add(batch_of(0))
    log.write(0)
    with safe_open(path := tmp_path / "rows/step_0.safetensors", framework="numpy") as file:
        listed = file.metadata()["list"]
        columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    assert '"has_trees":true' in listed
    save_file(columns, path, {"list": listed.replace(',"has_trees":true', "")})
    (found,) = StepReplay(tmp_path, 0).batches()
    assert not found.has_trees and found.micro_batches == batch_of(0).micro_batches


def test_each_step_and_each_rank_has_its_own_rows(tmp_path: Path):
    for rank in range(2):
        log = StepLog(tmp_path, rank, num_ranks=2)
        for step in range(2):
            log.add(batch_of(10 * rank + step))
            log.write(step)
    for rank in range(2):
        saved = StepReplay(tmp_path, 1, rank)
        assert saved.num_ranks == 2
        assert [row.row.prompt for batch in saved.batches() for row in batch.rows] == [10 * rank + 1] * 2
    assert not list(tmp_path.glob("rows/*.new"))


def test_rows_of_groups_that_were_left_out_are_not_saved(tmp_path: Path):
    batch = batch_of(0)
    log = StepLog(tmp_path)
    log.add(batch.without({GroupId(0, 0)}))
    log.write(0)
    (again,) = StepReplay(tmp_path, 0).batches()
    assert (again.row_batch.groups, again.micro_batches, again.columns) == ([], [[], [], []], {})


def test_a_run_without_saved_rows_is_refused_with_the_setting_that_saves_them(tmp_path: Path):
    with pytest.raises(SettingError, match=r"run\.save_rows=all"):
        StepReplay(tmp_path, 0)


@pytest.mark.parametrize(("num_checkpoints", "left"), [(2, [3, 4, 5, 6]), (1, [5, 6]), (0, [0, 1, 2, 3, 4, 5, 6])])
def test_rows_of_steps_before_the_last_checkpoints_are_removed(tmp_path: Path, num_checkpoints: int, left: list[int]):
    """A checkpoint that `latest` does not name yet may not be in the journal, so it does not count."""
    checkpoints = CheckpointFolder(tmp_path)
    logs = [StepLog(tmp_path, rank, num_ranks=2, num_checkpoints=num_checkpoints) for rank in range(2)]
    for step in range(7):
        for log in logs:
            log.write(step)
        if step in (2, 4, 5):
            checkpoints.begin(step + 1)
            checkpoints.seal(step + 1)
            if step < 5:
                checkpoints.set_latest(step + 1)
        assert num_checkpoints < 2 or step > 4 or (tmp_path / "rows/step_0.safetensors").exists(), "one may be damaged"
    assert sorted(path.name for path in (tmp_path / "rows").iterdir()) == sorted(
        f"step_{step}{rank}.safetensors" for step in left for rank in ("", ".1")
    )


def test_the_rows_of_a_step_wait_for_room_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The disk has room again when the wait for it begins."""
    with small_disk(tmp_path / "disk", megabytes=2) as disk:
        log, ballast = StepLog(disk, deadline_s=60), fill(disk)
        monkeypatch.setattr(disk_module, "say", lambda text: ballast.unlink(missing_ok=True))
        log.add(batch_of(0))
        log.write(0)
        assert [path.name for path in (disk / "rows").iterdir()] == ["step_0.safetensors"]
