"""The training data of each step in the run folder: `rows/step_N.safetensors` with the batches and their rows' columns.

A batch is saved with its micro-batches, which decide the packing, whether they are computed as prefix trees, and with the number of
threads, so a replay adds up the same numbers in the same order. With several actor ranks each saves its own rows, rank 1 in
`rows/step_N.1.safetensors`.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from ..comm.disk import make_folders, when_writable
from ..comm.errors import SettingError
from ..comm.messages import RowBatch, TrainBatch
from ..relay.checkpoints import CheckpointFolder
from ..relay.queue.batch import Batch
from ..relay.queue.row_file import RowFile, write_rows

ROWS = "rows"
"""Folder of these files in the run folder."""


class SavedBatch(msgspec.Struct, frozen=True):
    """A batch without its columns; micro-batches are lists of keys."""

    row_batch: TrainBatch | RowBatch
    micro_batches: list[list[str]]
    num_forward: int
    has_trees: bool = False
    """Files of earlier versions do not say, and have none."""


class SavedStep(msgspec.Struct, frozen=True):
    """The list of a file: the step's batches, and by how many actor ranks, in which fleet and with how many threads they were trained."""

    num_ranks: int
    run_id: str
    num_threads: Annotated[int, msgspec.Meta(ge=1)]
    batches: list[SavedBatch]


class StepLog:
    """Collects one rank's batches of a step, in their order, and writes them at its end."""

    def __init__(
        self,
        run_dir: Path,
        rank: int = 0,
        num_ranks: int = 1,
        deadline_s: float = 60.0,
        run_id: str = "",
        num_checkpoints: int = 0,
    ) -> None:
        """`deadline_s` bounds the wait for room on a full disk; `run_id` is the fleet's.

        Of the steps before the last `num_checkpoints` checkpoints the files are removed; with 0 all stay.
        """
        self._run_dir = run_dir
        self._rank = rank
        self._num_ranks = num_ranks
        self._deadline_s = deadline_s
        self._run_id = run_id
        self._num_checkpoints = num_checkpoints
        self._pruned_at: int | None = None
        self._batches: list[Batch] = []

    def add(self, batch: Batch) -> None:
        self._batches.append(batch)

    def write(self, step: int) -> None:
        """Write the step's file atomically, and start the next step. Files that are not needed any more are removed."""
        path = _path(self._run_dir, step, self._rank)
        rows = {row.key: batch.columns[row.key] for batch in self._batches for row in batch.rows}
        saved = [
            SavedBatch(
                batch.row_batch,
                [[row.key for row in part] for part in batch.micro_batches],
                batch.num_forward,
                batch.has_trees,
            )
            for batch in self._batches
        ]
        listed = SavedStep(self._num_ranks, self._run_id, torch.get_num_threads(), saved)

        def save() -> None:
            make_folders(self._run_dir, ROWS)
            write_rows(path, rows, listed)

        when_writable(path, save, self._deadline_s)
        self._batches = []
        if self._num_checkpoints:
            self._prune(CheckpointFolder(self._run_dir))

    def _prune(self, folder: CheckpointFolder) -> None:
        """Remove this rank's files of steps before the last checkpoints. `latest` names one once it is whole and in the journal.

        With fewer checkpoints than it takes, all files stay: the only one may turn out to be damaged.
        """
        if (latest := folder.latest()) is None or latest == self._pruned_at:
            return
        self._pruned_at = latest
        kept = [step for step in folder.whole() if step <= latest][-self._num_checkpoints :]
        if len(kept) < self._num_checkpoints:
            return
        for path in (self._run_dir / ROWS).glob("step_*.safetensors"):
            name, *rank = path.stem.split(".")
            if rank == ([str(self._rank)] if self._rank else []) and int(name.removeprefix("step_")) < kept[0]:
                path.unlink(missing_ok=True)


class StepReplay:
    """One rank's file of a step, for a replay. Raises `SettingError` if it is missing or damaged."""

    def __init__(self, run_dir: Path, step: int, rank: int = 0) -> None:
        path = _path(run_dir, step, rank)
        if not path.exists():
            raise SettingError(f"run.dir: {path} is missing; a replay needs a run with run.save_rows=all")
        self._file = RowFile(path, SavedStep)
        self.num_ranks = self._file.listed.num_ranks
        self.run_id = self._file.listed.run_id
        """ID of the start of the run that trained the step; a resumed run has another one."""
        self._step = step
        self._rank = rank

    def check_ranks(self, num_ranks: int) -> None:
        """Raise `SettingError` unless so many actor ranks trained the step."""
        if self.num_ranks != num_ranks:
            raise SettingError(
                f"roles.actor={num_ranks}: step {self._step + 1} was trained by {self.num_ranks} actor ranks"
            )

    @contextmanager
    def same_threads(self) -> Iterator[None]:
        """Compute with as many threads as the rank that trained the step: sums over many elements have one part for each."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._file.listed.num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def copy_to(self, run_dir: Path, columns: Collection[str]) -> None:
        """Write the step into the rows of another run folder, with no columns but these."""
        rows = self._file.read().items()
        kept = {key: {name: column for name, column in row.items() if name in columns} for key, row in rows}
        make_folders(run_dir, ROWS)
        path = _path(run_dir, self._step, self._rank)
        write_rows(path, kept, msgspec.structs.replace(self._file.listed, run_id=""))

    def batches(self) -> Iterator[Batch]:
        """The batches in the order of training. Raises `SettingError` if the file is damaged."""
        columns = self._file.read()
        for saved in self._file.listed.batches:
            rows = {row.key: row for row in saved.row_batch.rows()}
            with self._file.named_errors():
                micro_batches = [[rows[key] for key in part] for part in saved.micro_batches]
            yield Batch(saved.row_batch, micro_batches, columns, saved.num_forward, saved.has_trees)


def saved_steps(run_dir: Path) -> Iterator[tuple[Path, int]]:
    """The files of all ranks with their steps, counted from 0."""
    for path in (run_dir / ROWS).glob("step_*.safetensors"):
        if (step := path.name.removeprefix("step_").partition(".")[0]).isdecimal():
            yield path, int(step)


def rows_problem(run_dir: Path, step: int, num_ranks: int) -> str:
    """Why so many actor ranks cannot train a step again, "" if they can. It reads the heads of the files."""
    for rank in range(num_ranks):
        if not (path := _path(run_dir, step, rank)).exists():
            return f"{ROWS}/{path.name} is missing"
        try:
            StepReplay(run_dir, step, rank).check_ranks(num_ranks)
        except SettingError as error:
            return str(error).removeprefix("run.dir: ")
    return ""


def _path(run_dir: Path, step: int, rank: int) -> Path:
    return run_dir / ROWS / f"step_{step}{f'.{rank}' if rank else ''}.safetensors"
