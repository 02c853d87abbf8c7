"""The queue on the disk: rows of a unit are written with a checkpoint and read into the unit of a later run."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from support.in_memory import MemoryFleet, MemoryNetwork
from support.power_cut import PowerCuts

from headrace.comm.errors import StorageFull
from headrace.comm.fleet import Member
from headrace.comm.messages import RowId, RowRef, SaveQueue
from headrace.relay import checkpoints
from headrace.relay.checkpoints import CheckpointFolder
from headrace.relay.queue import row_file, saved_queue
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

    def put(self, sample: int, version: int = STEP, *, is_partial: bool = False) -> RowRef:
        """A row in the unit: finished, or the first tokens of one."""
        row = RowRef(RowId(0, 7, sample), 2, [], version, 4, reward=float(not is_partial), is_partial=is_partial)
        columns = {"response_ids": np.arange(sample, sample + 4, dtype=np.int32), "versions": np.full(4, version)}
        return replace(row, storage_ids=self.storage.put_new({row.key: columns})[row.key])


@pytest.fixture
def run() -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(stack)


@pytest.fixture
def later() -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(stack)


def save(run: Run, folder: Path, *rows: RowRef) -> int:
    saved = save_queue(folder, SaveQueue(1, STEP, 9, list(rows)), run.storage)
    assert not saved.problem
    return saved.num_rows


def test_saved_rows_are_in_the_units_of_a_later_run_with_the_same_bytes(run: Run, later: Run, tmp_path: Path):
    rows = [*(run.put(sample) for sample in range(70)), run.put(90, is_partial=True)]
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


def test_rows_are_read_back_once_the_first_unit_is_there(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    row = run.put(0)
    save(run, tmp_path, row)
    relay = MemoryFleet.join_network(MemoryNetwork(), "relay", 0)
    storage, unit, members = ReplicatedRows(relay), relay.host_rows(), relay.members

    def announced_late(role: str | None = None) -> list[Member]:
        """The unit is announced after the first look at the fleet."""
        found = members(role)
        relay.announce(unit=unit.address)
        return found

    monkeypatch.setattr(relay, "members", announced_late)
    found = restore_queue(tmp_path, STEP, storage)
    storage.close()
    unit.close()
    assert (found.problem, [each.key for each in found.rows]) == ("", [row.key])


@pytest.mark.parametrize(("trouble", "problem"), [("full", "no room for more"), ("gone", "no storage unit answered")])
def test_rows_that_no_unit_takes_stay_in_the_file_for_a_later_run(
    run: Run, later: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, problem: str
):
    row = run.put(0)
    save(run, tmp_path, row)
    monkeypatch.setattr(saved_queue, "UNIT_WAIT_S", 0.2)

    def put_rows(rows: object) -> list[str]:
        if trouble == "full":
            raise StorageFull("no room")
        return []

    with monkeypatch.context() as patched:
        patched.setattr(later.storage, "put_rows", put_rows)
        restored = restore_queue(tmp_path, STEP, later.storage)
    assert problem in restored.problem and restored.is_left and not restored.rows
    assert [each.key for each in restore_queue(tmp_path, STEP, later.storage).rows] == [row.key]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda file: file.unlink(), "lacks rows-"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes of rows-"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"?"), "has a damaged"),
        (lambda file: (file.parent / "manifest.json").unlink(), "is incomplete"),
    ],
)
def test_a_damaged_file_gives_no_row_and_says_why(run: Run, later: Run, tmp_path: Path, damage, problem: str):
    save(run, tmp_path, run.put(0))
    (file,) = tmp_path.glob(f"queue/step_{STEP}/rows-*.safetensors")
    damage(file)
    restored = restore_queue(tmp_path, STEP, later.storage)
    assert not restored.rows and problem in restored.problem and not restored.is_left
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


def test_a_power_cut_while_the_queue_is_written_again_leaves_the_old_rows_or_the_new_ones(
    run: Run, later: Run, tmp_path: Path
):
    old, new = run.put(0), run.put(1)
    (tmp_path / "run").mkdir()
    save(run, tmp_path / "run", old)
    with PowerCuts(tmp_path / "run", tmp_path / "cuts") as cuts:
        save(run, tmp_path / "run", old, new)
    found = [restore_queue(left, STEP, later.storage) for left in cuts.left]
    assert not any(restored.problem for restored in found)
    sizes = [len(restored.rows) for restored in found]
    assert sizes[0] == 1 and sizes[-1] == 2 and sizes == sorted(sizes)
    assert len(list((tmp_path / f"run/queue/step_{STEP}").iterdir())) == 2, "one file and its manifest"


def test_a_queue_that_cannot_be_written_again_leaves_the_one_before(
    run: Run, later: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = [run.put(0), run.put(1)]
    save(run, tmp_path, rows[0])

    def full(columns: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_file, "save_file", full)
    assert "No space left on device" in save_queue(tmp_path, SaveQueue(2, STEP, 9, rows), run.storage).problem
    assert [row.key for row in restore_queue(tmp_path, STEP, later.storage).rows] == [rows[0].key]
    assert len(list((tmp_path / f"queue/step_{STEP}").iterdir())) == 2


@pytest.mark.parametrize("left_out", ["queue", f"step_{STEP}"])
def test_a_folder_that_cannot_be_synced_leaves_the_rows_that_its_manifest_names(
    run: Run, later: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: str
):
    rows = [run.put(0), run.put(1)]
    save(run, tmp_path, rows[0])

    def fail(folder: Path) -> None:
        if folder.name == left_out:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoints, "sync_folder", fail)
    assert "Input/output error" in save_queue(tmp_path, SaveQueue(2, STEP, 9, rows), run.storage).problem
    restored = restore_queue(tmp_path, STEP, later.storage)
    assert restored.problem == "" and len(restored.rows) == (2 if left_out == "queue" else 1)


def test_an_old_file_that_cannot_be_removed_does_not_fail_the_save(
    run: Run, later: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = [run.put(0), run.put(1)]
    save(run, tmp_path, rows[0])
    unlink = Path.unlink

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        if path.name.startswith("rows-"):
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert save(run, tmp_path, *rows) == 2
    assert len(restore_queue(tmp_path, STEP, later.storage).rows) == 2
