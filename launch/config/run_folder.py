"""The folder of a run: made once, locked by the one that prepares a run in it, and watched while the run is under way."""

import fcntl
import json
import os
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ...comm.errors import SettingError

LOCK_FILE = "lock"
_LOCK_TRIES = 4
_LOCK_S = 0.05
"""Seconds between two tries to lock a run folder."""
CONFIG_FILE = "config.yaml"
"""File of the run folder with the resolved recipe."""
JOURNAL_FILE = "journal.jsonl"
JOURNAL_FOLDER = "journal"
"""Folder of the run folder with the older parts of the journal, and snapshots."""
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
"""File of the run folder that the hub writes when the run has ended."""


def start_in(run_dir: Path) -> str:
    """Tells the start of a run in this folder from others, on all hosts that share it; empty where it is not shared.

    Each start writes the recipe.
    """
    try:
        return str((run_dir / CONFIG_FILE).stat().st_mtime_ns)
    except OSError:
        return ""


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The summary that the hub wrote when the run ended, None without one."""
    try:
        return json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def make_run_folder(run_dir: str | Path) -> Path:
    """Make a run folder, with the permissions of the user's umask. An existing one stays as it is.

    Raises `SettingError`.
    """
    folder = Path(run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"run.dir: cannot create {folder}: {error.strerror}") from error
    return folder


def remove_empty(*folders: Path) -> None:
    """Remove empty folders, each before its parent."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def lock_run_folder(run_dir: Path) -> IO[bytes]:
    """The lock of a run folder. While the file is open, no other process prepares or starts a run there. It ends with the process.

    Raises `SettingError` if another process has it. On a file system without locks nothing is locked.
    """
    lock = (run_dir / LOCK_FILE).open("wb")
    for tries_left in reversed(range(_LOCK_TRIES)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if tries_left:
                time.sleep(_LOCK_S)  # `headrace status` looks at it for a moment
                continue
            lock.close()
            raise SettingError(f"run.dir: {under_way(run_dir)}") from None
        except OSError:  # as the docstring says
            break
    return lock


def under_way(run_dir: Path) -> str:
    """The message about a run folder whose run has not ended."""
    return f"a run is under way in {run_dir}; end it (headrace ctl {run_dir} stop), or set another run.dir"


class FolderWatch:
    """Whether a run folder is still in its place: otherwise a process that writes by its path would create a second folder."""

    def __init__(self, run_dir: Path) -> None:
        """Keeps the folder open, so that no later folder can have its inode number."""
        self._path = run_dir
        self._folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
        weakref.finalize(self, os.close, self._folder)

    @property
    def path(self) -> Path:
        """Where the folder is now. Of one that was removed there is nothing."""
        return Path(f"/proc/self/fd/{self._folder}").resolve() if self.problem() else self._path

    def problem(self) -> str:
        """The message about a folder that was moved or removed; empty while it is in its place."""
        try:
            is_same = os.path.samestat(os.fstat(self._folder), self._path.stat())
        except (FileNotFoundError, NotADirectoryError):
            is_same = False
        except OSError:  # a network's file system that does not answer now
            is_same = True
        if is_same:
            return ""
        return (
            f"run.dir: {self._path} was renamed or removed while its run was under way, so the run has ended; move the folder"
            " back, and run.resume=auto continues"
        )
