"""The training data of each step in the run folder: `rows/step_N.safetensors` with the batches and their rows' columns.

A batch is saved with its micro-batches, which decide the packing, and with the number of threads, so a replay adds up the same numbers
in the same order. With several actor ranks each saves its own rows, rank 1 in `rows/step_N.1.safetensors`.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..comm.disk import make_folders, raise_if_unwritable, when_writable
from ..comm.errors import MessageRefused, SettingError
from ..comm.messages import TrainBatch, decode, encode
from ..relay.checkpoints import CheckpointFolder, share_by_umask
from ..relay.queue.batch import Batch

ROWS = "rows"
"""Folder of these files in the run folder."""
_NUM_RANKS, _RUN_ID, _NUM_THREADS = "ranks", "run", "threads"


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
        columns: dict[str, np.ndarray] = {}
        metadata = {_NUM_RANKS: str(self._num_ranks), _RUN_ID: self._run_id, _NUM_THREADS: str(torch.get_num_threads())}
        for number, batch in enumerate(self._batches):
            metadata[f"{number}"] = encode(batch.row_batch).decode()
            metadata[f"{number}.rows"] = json.dumps([[row.key for row in part] for part in batch.micro_batches])
            metadata[f"{number}.forward"] = str(batch.num_forward)
            for row in batch.rows:
                columns |= {f"{row.key}/{name}": column for name, column in batch.columns[row.key].items()}
        when_writable(path, lambda: _save(columns, path, metadata), self._deadline_s)
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


def _save(columns: dict[str, np.ndarray], path: Path, metadata: dict[str, str]) -> None:
    make_folders(path.parent.parent, ROWS)
    new = path.with_suffix(".new")
    try:
        save_file(columns, new, metadata)
        share_by_umask(new)
    except SafetensorError:
        try:
            raise_if_unwritable(path.parent)
        finally:
            new.unlink(missing_ok=True)
        raise
    new.replace(path)


class StepReplay:
    """One rank's file of a step, for a replay. Raises `SettingError` if it is missing."""

    def __init__(self, run_dir: Path, step: int, rank: int = 0) -> None:
        self._path = _path(run_dir, step, rank)
        if not self._path.exists():
            raise SettingError(f"run.dir: {self._path} is missing; a replay needs a run with run.save_rows=all")
        with self._named_errors(), safe_open(self._path, framework="numpy") as file:
            self._metadata: dict[str, str] = file.metadata() or {}
        if _NUM_RANKS not in self._metadata:
            raise SettingError(f"run.dir: {self._path} was written by an older version, without micro-batches")
        with self._named_errors():
            self.num_ranks = int(self._metadata[_NUM_RANKS])
            """The number of actor ranks that trained the step."""
        self.run_id = self._metadata.get(_RUN_ID, "")
        """That of the fleet that trained the step: a resumed run has another one."""
        self.num_threads = int(self._metadata.get(_NUM_THREADS, 1))
        """The threads of the rank that trained the step; it had one before files had this number."""
        self._step = step

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
        torch.set_num_threads(self.num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def batches(self) -> Iterator[Batch]:
        """The batches in the order of training. Raises `SettingError` if the file is damaged."""
        columns: dict[str, dict[str, np.ndarray]] = {}
        with self._named_errors(), safe_open(self._path, framework="numpy") as file:
            for tensor in file.keys():  # noqa: SIM118 - not a mapping
                key, _, name = tensor.partition("/")
                columns.setdefault(key, {})[name] = file.get_tensor(tensor)
        for number in range(sum(name.endswith(".rows") for name in self._metadata)):
            with self._named_errors():
                row_batch = decode(self._metadata[f"{number}"].encode())
                if not isinstance(row_batch, TrainBatch):
                    raise TypeError(f"a {type(row_batch).__name__} is not a batch of rows")
                rows = {row.key: row for row in row_batch.rows()}
                micro_batches = [[rows[key] for key in part] for part in json.loads(self._metadata[f"{number}.rows"])]
                num_forward = int(self._metadata.get(f"{number}.forward", 0))  # absent in files of older versions
            yield Batch(row_batch, micro_batches, columns, num_forward)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, MessageRefused, ValueError, TypeError, KeyError) as error:
            raise SettingError(f"run.dir: {self._path} is damaged: {error}") from error


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
