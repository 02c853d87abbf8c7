"""The hub's journal: every decision as one JSON line, written before it takes effect.

`headrace audit` prints what a journal says.
"""

import fcntl
import logging
import math
import os
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path

import msgspec

from ...comm.disk import REMEDY, AppendFile, DiskReserve, make_folders
from ...comm.errors import DiskFull, HeadraceError
from ..checkpoints import sync_folder
from .events import Checkpointed, Continued, Event
from .files import BLOCK_BYTES, JournalError, folder_of, named_by_place, parts_of, tail_digest
from .hub_state import HubState
from .snapshots import NEW_SNAPSHOT, write_snapshot

_LAST_WAIT_S = 5.0
"""Longest wait for room once the reserve is in use."""

_log = logging.getLogger(__name__)


class Journal:
    """Append-only file of events. `append` returns after the operating system has the line, `keep` after the disk has all of them.

    A last line without an end, whose writer died, is cut off when the journal is opened again: a line appended to it could
    not be read.
    """

    tail_bytes: float = 1 << 24
    """Most bytes after a snapshot: 110,000 events, which the next hub folds in less than a second."""
    part_bytes: float = 1 << 28
    """A file that has as many is continued in another one at the next snapshot."""

    def __init__(self, path: Path, deadline_s: float = 60.0, reserve: DiskReserve | None = None) -> None:
        """`deadline_s` bounds the wait for room on a full disk; then the lines go into the reserve, and the run has to end."""
        self.path = path
        self.deadline_s = deadline_s
        self.full = ""
        """The message about the full disk once the reserve is in use."""
        self._reserve = reserve
        self._file = AppendFile(path, deadline_s)
        self._lock(self._file)
        try:
            start = parts_of(path)[-1].start
        except JournalError:
            self._file.close()
            raise
        os.ftruncate(self._file.descriptor, _end_of_last_line(path))
        self._place = start + self._file.num_bytes
        self._tidy(start)
        self._snapshot_place = 0
        """That of the last one that this writer made: the first one is due with the first event of a long journal."""
        self._encoder = msgspec.json.Encoder()

    def append(self, event: Event) -> None:
        """Write an event as a whole line. Raises `DiskFull` or `JournalError` if that fails; the file is then as before."""
        line = self._encoder.encode(event) + b"\n"
        try:
            self._append(line)
        except OSError as error:
            raise JournalError(f"{self.path} cannot be written: {error}; {REMEDY}, or set another run.dir") from error
        self._place += len(line)

    def needs_snapshot(self, event: Event) -> bool:
        """Whether a snapshot is due after this event, the last one: with each checkpoint, and before the next hub would fold much."""
        return isinstance(event, Checkpointed) or self._place - self._snapshot_place >= self.tail_bytes

    def keep(self, state: HubState) -> None:
        """Sync all lines, and write a snapshot of the state after the last one. If the file is long, another one continues it first.

        So a checkpoint from which a run may resume survives a power cut, with all before it. Nothing needs the rest: without a
        snapshot the next hub folds more events, and if another file cannot be begun, this one is used to the end. A disk that ends the
        run because it is full gets neither.
        """
        os.fsync(self._file.descriptor)
        if self._file.num_bytes >= self.part_bytes and not self.full:
            try:
                self._continue()
            except (OSError, HeadraceError) as error:
                _log.warning("%s is not continued in other files from here on: %s", self.path, error)
                self.part_bytes = math.inf
        if not self.full:
            try:
                write_snapshot(self.path, self._place, state)
            except (OSError, HeadraceError) as error:
                _log.warning("no snapshot of the journal: %s", error)
        self._snapshot_place = self._place

    def close(self) -> None:
        self._file.close()
        if self._reserve is not None:
            self._reserve.release()

    @staticmethod
    def is_in_use(path: Path) -> bool:
        """Whether a hub writes this journal now."""
        with path.open("rb") as file, suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return True  # its hub has just begun another file
        return False

    def _lock(self, file: AppendFile) -> None:
        """One process writes a journal: a hub that was only frozen must not write after the next one has opened it."""
        try:
            fcntl.flock(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = file.path.exists() and os.path.samestat(os.fstat(file.descriptor), file.path.stat())
        except BlockingIOError:
            is_free = False
        except OSError as error:
            _log.warning("%s cannot be locked: %s", file.path, error)
            is_free = True
        if not is_free:  # or another file has its name by now
            file.close()
            raise JournalError(f"{file.path} is in use by another process; end that run, or set another run.dir")

    def _append(self, line: bytes) -> None:
        try:
            self._file.append(line)
        except DiskFull as error:
            if self._reserve is None or self.full:
                raise
            self.full = str(error)
            self._file.deadline_s = _LAST_WAIT_S
            self._reserve.release()
            self._file.append(line)

    def _continue(self) -> None:
        """Begin another file, which takes this one's name; this one gets that of its place.

        At each moment a file has the name, and is locked. After a power cut it is the one or the other, whole. Raises `OSError`, such as
        on a file system without second names; the lines go to the file that has the name then.
        """
        num_bytes = self._file.num_bytes
        with self.path.open("rb") as written:
            after = tail_digest(written, num_bytes)
        line = self._encoder.encode(Continued(start=self._place, after=after)) + b"\n"
        older = make_folders(self.path.parent, folder_of(self.path).name) / f"{self._place - num_bytes}.jsonl"
        new = self.path.with_name(f"{self.path.name}.new")
        with ExitStack() as undo:
            undo.callback(new.unlink, missing_ok=True)
            new.write_bytes(line)
            file = AppendFile(new, self.deadline_s)
            undo.callback(file.close)
            self._lock(file)
            os.fsync(file.descriptor)
            os.link(self.path, older)
            sync_folder(older.parent)
            sync_folder(self.path.parent)
            new.replace(self.path)
            undo.pop_all()
        self._file.close()
        self._file = file
        file.path = self.path
        self._place += len(line)
        sync_folder(self.path.parent)

    def _tidy(self, start: int) -> None:
        """Give parts that do not begin before this file, at `start`, other names, and remove needless snapshots: no line is removed.

        A hub that died while it began a file left this one with two names.
        """
        for place, path in named_by_place(self.path, "jsonl").items():
            if place < start:
                continue
            if path.samefile(self.path):
                path.unlink()
                continue
            names = (path.with_name(f"{path.name}.discarded-{number}") for number in count(1))
            aside = path.rename(next(name for name in names if not name.exists()))
            _log.warning("%s begins with byte %d: %s is now %s", self.path, start, path, aside.name)
        with suppress(OSError):
            (folder_of(self.path) / NEW_SNAPSHOT).unlink(missing_ok=True)
            for place, path in named_by_place(self.path, "state").items():
                if place > self._place:
                    path.unlink()


def _end_of_last_line(path: Path) -> int:
    """Bytes of a journal up to the end of its last whole line."""
    end = os.path.getsize(path)
    with path.open("rb") as file:
        while end:
            start = max(0, end - BLOCK_BYTES)
            file.seek(start)
            block = file.read(end - start)
            if (at := block.rfind(b"\n")) >= 0:
                return start + at + 1
            end = start
    return 0
