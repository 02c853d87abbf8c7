"""The queue on the disk: rows of a unit are written with a checkpoint and read into the unit of a later run."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support.in_memory import MemoryFleet, MemoryNetwork

from headrace.comm.messages import RowId, SavedRow, SaveQueue
from headrace.relay.checkpoints import CheckpointFolder
from headrace.relay.queue.replicated_rows import ReplicatedRows
from headrace.relay.queue.saved_queue import restore_queue, save_queue

STEP = 3


class Run:
    """One run's storage unit, and a reader and writer of it."""

    def __init__(self, stack: ExitStack) -> None:
        self.relay = MemoryFleet.join_network(MemoryNetwork(), "relay", 0)
        unit = self.relay.host_rows()
        stack.callback(unit.close)
        self.relay.announce(unit=unit.address)
        self.unit = unit
        self.storage = ReplicatedRows(self.relay)
        stack.callback(self.storage.close)

    def put(self, sample: int, version: int = STEP, reward: float | None = 1.0) -> SavedRow:
        """A row in the unit: finished, or the first tokens of one."""
        row = SavedRow(RowId(0, 7, sample), 2, [], version, 4, reward)
        columns = {"response_ids": np.arange(sample, sample + 4, dtype=np.int32), "versions": np.full(4, version)}
        return SavedRow(row.row, 2, self.storage.put_row(row.key, columns), version, 4, reward)


@pytest.fixture
def run() -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(stack)


@pytest.fixture
def later() -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(stack)


def save(run: Run, folder: Path, *rows: SavedRow) -> int:
    saved = save_queue(folder, SaveQueue(1, STEP, 9, list(rows)), run.storage)
    assert not saved.problem
    return saved.num_rows


def test_saved_rows_are_in_the_units_of_a_later_run_with_the_same_bytes(run: Run, later: Run, tmp_path: Path):
    rows = [*(run.put(sample) for sample in range(70)), run.put(90, reward=None)]
    assert save(run, tmp_path, *rows) == 71
    restored = restore_queue(tmp_path, STEP, later.storage)
    assert (restored.cursor, restored.problem) == (9, "")
    assert [(row.key, row.reward, row.storage_ids) for row in restored.rows] == [
        (row.key, row.reward, ["relay-0#1"]) for row in rows
    ]
    for old, new in zip(rows, restored.rows, strict=True):
        expected, found = run.storage.get_row(old.key, old.storage_ids), later.storage.get_row(new.key, new.storage_ids)
        assert expected.keys() == found.keys()
        assert all(np.array_equal(expected[name], found[name]) for name in expected)


def test_rows_of_a_later_version_and_those_trained_meanwhile_are_left_out(run: Run, later: Run, tmp_path: Path):
    kept, newer, gone = run.put(0), run.put(1, version=STEP + 1), run.put(2)
    run.unit.drop([gone.key])
    assert save(run, tmp_path, kept, newer, gone) == 1
    assert [row.key for row in restore_queue(tmp_path, STEP, later.storage).rows] == [kept.key]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda file: file.unlink(), "lacks rows.safetensors"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes of rows.safetensors"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"?"), "holds other bytes"),
        (lambda file: (file.parent / "manifest.json").unlink(), "was not written to its end"),
    ],
)
def test_a_damaged_file_gives_no_row_and_says_why(run: Run, later: Run, tmp_path: Path, damage, problem: str):
    save(run, tmp_path, run.put(0))
    damage(tmp_path / f"queue/step_{STEP}/rows.safetensors")
    restored = restore_queue(tmp_path, STEP, later.storage)
    assert not restored.rows and problem in restored.problem
    assert not later.unit.listing()


def test_a_checkpoint_without_a_saved_queue_is_no_problem(later: Run, tmp_path: Path):
    restored = restore_queue(tmp_path, STEP, later.storage)
    assert (restored.rows, restored.problem) == ([], "")


def test_the_queue_of_a_checkpoint_that_is_gone_is_removed(run: Run, tmp_path: Path):
    checkpoints = CheckpointFolder(tmp_path)
    for step in (1, STEP):
        checkpoints.begin(step)
        checkpoints.seal(step)
    row = run.put(0, version=0)
    for step in (1, 2, STEP):
        save_queue(tmp_path, SaveQueue(step, step, 9, [row]), run.storage)
    assert sorted(path.name for path in (tmp_path / "queue").iterdir()) == ["step_1", f"step_{STEP}"]
