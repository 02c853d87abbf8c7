"""Disks that are full or read-only: a write waits until it can be done, says so on the console, and leaves a file as it was before."""

import errno
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from .clock import clock_text, elapsed_s
from .errors import DiskFull
from .waits import waiting

T = TypeVar("T")

PROBE_BYTES = 1 << 16
RETRY_S = 0.5
"""Seconds between two attempts while a disk cannot be written."""
REMEDY = "make room there, or make it writable"


def is_unwritable(error: OSError) -> bool:
    """Whether a write failed because the disk or the user's quota is full, or the disk is mounted read-only."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def describe_unwritable(path: Path) -> str:
    """The message about a file of the run folder that cannot be written because of its disk."""
    disk = os.statvfs(next(folder for folder in path.absolute().parents if folder.exists()))
    if disk.f_flag & os.ST_RDONLY:
        return f"run.dir is read-only: {path} cannot be written"
    free = f"{disk.f_bavail * disk.f_frsize:,} bytes free"
    if disk.f_files and not disk.f_favail:
        free = f"no inode free for another file, with {free}"
    return f"run.dir is full: {path} cannot be written, its disk has {free} (or a quota is used up)"


def say(text: str) -> None:
    """Print a line; the output may go to a file on the same full disk."""
    with suppress(OSError):
        print(text, flush=True)
        sys.stdout.flush()


def tell(text: str) -> None:
    """Print a line on the console, after the time since the run was started."""
    say(f"{clock_text(elapsed_s()):>7}  {text}")


def when_writable(path: Path, write: Callable[[], T], deadline_s: float) -> T:
    """Call `write` until the disk of `path` has room, for at most `deadline_s`; `write` must undo a partial write itself.

    Raises `DiskFull` after the deadline, and at once any error with another cause.
    """
    try:
        return write()
    except OSError as error:
        if not is_unwritable(error):
            raise
    say(f"{describe_unwritable(path)}; the run waits for up to {deadline_s:g} s")
    with waiting("the disk", f"room for {path}", deadline_s) as wait:
        while wait.remaining_s > 0:
            time.sleep(min(RETRY_S, wait.remaining_s))
            try:
                result = write()
            except OSError as error:
                if not is_unwritable(error):
                    raise
            else:
                say(f"{path} can be written again; the run continues")
                return result
    raise DiskFull(f"{describe_unwritable(path)}; {REMEDY}, or set another run.dir")


def raise_if_unwritable(folder: Path) -> None:
    """Raise an `OSError` if the cause is a full or read-only disk; libraries in other languages hide the error number."""
    probe = folder / f"probe-{os.getpid()}-{time.monotonic_ns()}"
    try:
        with probe.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, PROBE_BYTES)
    finally:
        probe.unlink(missing_ok=True)


def make_folders(above: Path, *names: str) -> Path:
    """Make a folder below an existing one, by its names. Raises `FileNotFoundError` if the existing one is gone.

    The run folder is made once, before the start. If it is renamed or removed during the run, it is not made again.
    """
    for name in names:
        above = above / name
        above.mkdir(exist_ok=True)
    return above


class AppendFile:
    """An append-only file of whole records. If a record does not fit, its part is cut off, and it waits for room."""

    def __init__(self, path: Path, deadline_s: float, *, is_new: bool = False) -> None:
        """Opens the file, and waits for room if it is a new one on a full disk. is_new: it must not exist.

        Raises `DiskFull`, and `FileExistsError`.
        """
        self.path = path
        self.deadline_s = deadline_s
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | (os.O_EXCL if is_new else 0)
        self.descriptor = when_writable(path, lambda: os.open(path, flags, 0o644), deadline_s)

    def append(self, record: bytes) -> None:
        """Write a record; returns once the operating system has it. Raises `DiskFull`, or an `OSError` with another cause."""
        when_writable(self.path, lambda: self._write(memoryview(record)), self.deadline_s)

    @property
    def num_bytes(self) -> int:
        """The size of the open file, also if its name was removed."""
        return os.fstat(self.descriptor).st_size

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _write(self, record: memoryview) -> None:
        num_bytes = self.num_bytes
        try:
            while record:  # a disk that becomes full accepts a part of it first
                record = record[os.write(self.descriptor, record) :]
        except OSError:
            os.ftruncate(self.descriptor, num_bytes)
            raise


class DiskReserve:
    """A file that reserves space on the disk for the last records of a run whose disk stays full."""

    NAME = "reserve"
    NUM_BYTES = 1 << 20

    def __init__(self, folder: Path) -> None:
        self._path = folder / self.NAME
        # On a disk without this room the run can only end less well.
        with suppress(OSError), self._path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.NUM_BYTES)

    def release(self) -> None:
        """Free the reserved space; a second call does nothing."""
        self._path.unlink(missing_ok=True)


def folder_bytes(folder: Path) -> int:
    """The bytes of all files in a folder, those under way included. Files may be renamed and folders removed meanwhile."""
    found = 0
    for path, _, files in os.walk(folder):  # unlike `rglob`, it passes over what is gone
        for name in files:
            with suppress(OSError):
                found += Path(path, name).stat().st_size
    return found
