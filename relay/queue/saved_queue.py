"""The queue on the disk, so that a resumed run generates none of its rows again: `queue/step_N/` for the checkpoint after N steps.

    rows-*.safetensors    the rows (`row_file.py`); its list has them and the position in the data
    manifest.json         names this file, with size and digest; written last (`relay/checkpoints.py`)

A relay writes it in the background, from the copies in the storage units. When it is written again, a new file comes beside the old one
and the manifest changes over to it, so a power cut leaves one of them whole. Rows of a later version than N are left out: a
resumed run has other weights under that number.
"""

import logging
import queue
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from ...comm import threads
from ...comm.disk import make_folders
from ...comm.errors import StorageFull, WaitTimeout
from ...comm.messages import Message, QueueRestored, QueueSaved, RestoreQueue, RowRef, SaveQueue
from ...comm.waits import join_thread, waiting
from ..checkpoints import MANIFEST, CheckpointFolder
from .replicated_rows import ReplicatedRows
from .row_file import RowFile, write_rows

log = logging.getLogger(__name__)

UNIT_WAIT_S = 60.0
"""Longest wait for a storage unit that lives, when rows are read back."""
_POLL_S = 0.05
_ROWS_PER_PUT = 64
_IDLE_S = 60.0
_CLOSE_S = 10.0


class SavedList(msgspec.Struct, frozen=True):
    """The rows of a file and the position in the data that the hub had reached."""

    cursor: int
    rows: list[RowRef]


class QueueKeeper:
    """A relay's thread that writes the queue to the disk and reads it back; each order is answered through `report`."""

    def __init__(self, run_dir: Path, storage: ReplicatedRows, report: Callable[[Message], None]) -> None:
        self._run_dir = run_dir
        self._storage = storage
        self._report = report
        self._orders: queue.Queue[SaveQueue | RestoreQueue | None] = threads.new_queue()
        self._thread = threads.new_thread(self._run, "queue keeper")

    def start(self) -> "QueueKeeper":
        """Start the thread; returns itself."""
        self._thread.start()
        return self

    def submit(self, order: SaveQueue | RestoreQueue) -> None:
        """Carry out an order after those before it; returns at once."""
        self._orders.put(order)

    def close(self) -> None:
        """End the thread once it has carried out its orders, and close the connections to the units."""
        self._orders.put(None)
        join_thread(self._thread, _CLOSE_S)
        self._storage.close()

    def _run(self) -> None:
        """Carry out orders. Waits for the next one; ended by `close`."""
        while True:
            with suppress(queue.Empty):
                match self._orders.get(timeout=_IDLE_S):
                    case SaveQueue() as order:
                        self._report(save_queue(self._run_dir, order, self._storage))
                    case RestoreQueue(step=step):
                        self._report(restore_queue(self._run_dir, step, self._storage))
                    case None:
                        return


def save_queue(run_dir: Path, order: SaveQueue, storage: ReplicatedRows) -> QueueSaved:
    """Write those rows that the units still have; files of checkpoints that are gone are removed."""
    folder = CheckpointFolder(run_dir, "queue")
    columns: dict[str, dict[str, np.ndarray]] = {}
    saved: list[RowRef] = []
    present, _ = storage.get_rows(order.rows)  # the others are trained meanwhile
    for row in order.rows:
        found = present.get(row.key)
        if found is not None and found.get("versions", np.empty(0)).max(initial=0) <= order.step:
            saved.append(row)
            columns[row.key] = found
    file = folder.path(order.step) / f"rows-{time.time_ns()}.safetensors"
    try:
        make_folders(run_dir, folder.root.name, file.parent.name)
        write_rows(file, columns, SavedList(order.cursor, saved))
        folder.seal(order.step, pattern=file.name)
    except OSError as error:
        manifest = folder.whole().get(order.step)
        if manifest is None or file.name not in manifest.files:  # else only the last sync failed
            with suppress(OSError):
                file.unlink(missing_ok=True)
        return QueueSaved(order.number, 0, f"{file.parent}: {error.strerror or error}")
    _remove_others(file, CheckpointFolder(run_dir))
    return QueueSaved(order.number, len(saved))


def _remove_others(file: Path, checkpoints: CheckpointFolder) -> None:
    """Remove what a newly written file replaces, and files of checkpoints that are gone; what cannot be removed stays."""
    with suppress(OSError):
        for older in file.parent.glob("rows*"):
            if older != file:
                older.unlink()
        for folder in file.parent.parent.glob("step_*"):
            if folder != file.parent and not (checkpoints.root / folder.name / MANIFEST).exists():
                shutil.rmtree(folder, ignore_errors=True)


def restore_queue(run_dir: Path, step: int, storage: ReplicatedRows) -> QueueRestored:
    """Put the rows of a file into the storage units, as many as there is room for. Waits for a unit, at most `UNIT_WAIT_S`."""
    folder = CheckpointFolder(run_dir, "queue")
    if not folder.path(step).exists():
        return QueueRestored(step, 0, [])
    if problem := folder.problem(step):
        return QueueRestored(step, 0, [], f"{folder.path(step)} {problem}")
    restored: list[RowRef] = []
    try:
        (name,) = folder.whole()[step].files
        file = RowFile(folder.path(step) / name, SavedList)
        for part in _parts(file.listed.rows):
            units, problem = _put(file.read(row.key for row in part), storage)
            if problem:
                return QueueRestored(step, file.listed.cursor, restored, problem, is_left=True)
            restored += [msgspec.structs.replace(row, storage_ids=units) for row in part]
    except (KeyError, ValueError) as error:  # a manifest that went or names several files, or a damaged file
        return QueueRestored(step, 0, [], f"{folder.path(step)} cannot be read: {error}")
    return QueueRestored(step, file.listed.cursor, restored)


def _put(rows: dict[str, dict[str, np.ndarray]], storage: ReplicatedRows) -> tuple[list[str], str]:
    """Write rows to the units; returns those that have them, and why none has."""
    try:
        with waiting("storage units", "the rows of the saved queue", UNIT_WAIT_S) as wait:
            return wait.until(partial(storage.put_rows, rows), _POLL_S), ""
    except StorageFull:
        return [], "the storage units have no room for more"
    except WaitTimeout:
        return [], f"no storage unit answered for {UNIT_WAIT_S:g} s"


def _parts(rows: list[RowRef]) -> Iterator[list[RowRef]]:
    return (rows[start : start + _ROWS_PER_PUT] for start in range(0, len(rows), _ROWS_PER_PUT))
