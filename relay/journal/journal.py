"""The hub's journal: every decision as one JSON line, written before it takes effect.

`headrace audit` prints what a journal says.
"""

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...comm.disk import REMEDY, AppendFile, DiskReserve, describe_unwritable, is_unwritable
from ...comm.errors import DiskFull, HeadraceError
from ...comm.messages.base import RowId
from ..checkpoints import sync_folder
from .events import Checkpointed, Evaluated, EvaluationBegun, Event, Opened, Trained, decode_event
from .state import HubState, apply

_BLOCK_BYTES = 1 << 20
_OPENED = b'{"event":"Opened",'
_LAST_WAIT_S = 5.0
"""Longest wait for room once the reserve is in use."""

_log = logging.getLogger(__name__)


class JournalError(HeadraceError):
    """A journal line is not an event, not a legal one, or cannot be written; the message names the file."""


class Journal:
    """Append-only file of events. `append` returns after the operating system has the line, and a checkpoint's the disk.

    A last line without an end, whose writer died, is cut off when the journal is opened again: a line appended to it could
    not be read.
    """

    def __init__(self, path: Path, deadline_s: float = 60.0, reserve: DiskReserve | None = None) -> None:
        """`deadline_s` bounds the wait for room on a full disk; then the lines go into the reserve, and the run has to end."""
        self.path = path
        self.deadline_s = deadline_s
        self.full = ""
        """The message about the full disk once the reserve is in use."""
        self._reserve = reserve
        self._file = AppendFile(path, deadline_s)
        self._lock()
        os.ftruncate(self._file.descriptor, _end_of_last_line(path))
        self._encoder = msgspec.json.Encoder()

    def append(self, event: Event) -> None:
        """Write an event as a whole line. Raises `DiskFull` or `JournalError` if that fails; the file is then as before."""
        line = self._encoder.encode(event) + b"\n"
        try:
            self._append(line)
        except OSError as error:
            raise JournalError(f"{self.path} cannot be written: {error}; {REMEDY}, or set another run.dir") from error
        if isinstance(event, Checkpointed):
            # A run may resume from it now, so it survives a power cut, with all before it.
            os.fsync(self._file.descriptor)

    def move_to(self, path: Path) -> None:
        """Take the place of another journal. After a power cut the file is that one or this one, whole."""
        os.fsync(self._file.descriptor)
        self.path.replace(path)
        sync_folder(path.parent)
        self.path = self._file.path = path

    @staticmethod
    def is_in_use(path: Path) -> bool:
        """Whether a hub writes this journal now."""
        with path.open("rb") as file, suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _lock(self) -> None:
        """One process writes a journal: a hub that was only frozen must not write after the next one has opened it."""
        try:
            fcntl.flock(self._file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = self.path.exists() and os.path.samestat(os.fstat(self._file.descriptor), self.path.stat())
        except BlockingIOError:
            is_free = False
        except OSError as error:
            _log.warning("%s cannot be locked: %s", self.path, error)
            is_free = True
        if not is_free:  # or another file has its name by now
            self._file.close()
            raise JournalError(f"{self.path} is in use by another process; end that run, or set another run.dir")

    def close(self) -> None:
        self._file.close()
        if self._reserve is not None:
            self._reserve.release()

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


def read_events(path: Path) -> Iterator[tuple[int, Event]]:
    """(line number, event) of a journal. A last line without an end, whose writer died, is left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield number, decode_event(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise JournalError(f"{path}:{number}: {error}") from error


def replay(path: Path, note: Callable[[Event], None] = lambda event: None) -> HubState:
    """The state after all events of a journal; `note` is called with each event. Raises `JournalError` at an illegal line.

    The account is checked after each trained step and at the end, since its cost grows with the length of the queue.
    """
    state = HubState()
    number = 0
    for number, event in read_events(path):
        try:
            apply(event, state)
        except (AssertionError, KeyError, IndexError) as error:
            raise JournalError(f"{path}:{number}: {error}") from error
        note(event)
        if isinstance(event, Trained) and not state.is_balanced:
            break
    if not state.is_balanced:
        raise JournalError(f"{path}:{number}: the account does not add up: {account_dict(state)}")
    return state


def last_opened(path: Path) -> Opened | None:
    """The event of the run that opened a journal last. Only lines of that kind are decoded."""
    found = b""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if line.startswith(_OPENED) and line.endswith(b"\n"):
                    found = line
    return msgspec.json.decode(found, type=Opened) if found else None


class KnownSteps(NamedTuple):
    """The optimizer steps of a journal, as far as it can be read."""

    lines: dict[int, int]
    """For each number of trained steps, the number of the line of the last one."""
    checkpoints: set[int]
    """The numbers of steps after which checkpoints were written."""

    @property
    def num_trained(self) -> int:
        return max(self.lines, default=0)


def steps_in(path: Path) -> KnownSteps:
    """The trained steps of a journal, and its checkpoints; none of a file that is missing.

    A checkpoint is written while training goes on, so its own line may be much later than its step's. Reading ends at a damaged
    line: it is younger than the checkpoints before it, whose lines were synced to the disk.
    """
    known = KnownSteps({}, set())
    try:
        for number, event in read_events(path) if path.exists() else ():
            if isinstance(event, Trained):
                known.lines[event.step + 1] = number
            elif isinstance(event, Checkpointed) and event.step in known.lines:
                known.checkpoints.add(event.step)
    except JournalError as error:
        _log.warning("%s; the lines from there on are not used", error)
    return known


def cut_after(path: Path, step: int, checkpoint: int | None, rest: Path) -> None:
    """Cut a journal after its first `step` optimizer steps; the lines after them go to the file `rest`.

    The event of the checkpoint, and those of evaluations of version `step` and earlier ones, stay true and stay in it. A new file
    takes the place of the old one: a power cut leaves one of them. Raises `JournalError` if the journal has not so many steps, or
    is in use, and `DiskFull`.
    """
    if (last_line := steps_in(path).lines.get(step)) is None:
        raise JournalError(f"{path} has no step {step}")
    new = path.with_name(f"{path.name}.new")
    with closing(Journal(path)):  # locked: no hub of the run before writes any more
        with path.open("rb") as file:
            kept_bytes = sum(len(line) for line in islice(file, last_line))
        _copy_bytes(path, 0, kept_bytes, new)
        try:
            _copy_bytes(path, kept_bytes, path.stat().st_size, rest)
        except DiskFull:
            new.unlink()
            raise
        checkpointed, evaluations = _true_beyond(path, step, checkpoint, last_line)
        opened = last_opened(path)
        before = last_opened(new)
        if opened is not None and before is not None and (evaluations or opened != before):
            # It has the newest facts of the data; evaluations that were under way at the cut are not leased any more.
            evaluations.insert(0, msgspec.structs.replace(opened, epoch=before.epoch + 1, run_id=""))
        with closing(Journal(new)) as journal:
            for event in (*checkpointed, *evaluations):
                journal.append(event)
            journal.move_to(path)


def _copy_bytes(path: Path, start: int, end: int, into: Path) -> None:
    """Copy a part of a file and sync the copy. On a full disk nothing is left of it, and `DiskFull` is raised."""
    try:
        with path.open("rb") as source, into.open("wb") as copy:
            source.seek(start)
            while block := source.read(min(_BLOCK_BYTES, end - source.tell())):
                copy.write(block)
            copy.flush()
            os.fsync(copy.fileno())
    except OSError as error:
        into.unlink(missing_ok=True)
        if not is_unwritable(error):
            raise
        raise DiskFull(f"{describe_unwritable(into)}; {REMEDY}, the run can be resumed as before") from error


def _true_beyond(
    path: Path, step: int, checkpoint: int | None, last_line: int
) -> tuple[list[Checkpointed], list[Event]]:
    """The events after a line that belong to a checkpoint, and to evaluations of versions up to `step`."""
    numbers: set[int] = set()
    checkpointed: list[Checkpointed] = []
    found: list[Event] = []
    with suppress(JournalError):  # `steps_in` has said so
        for line, event in read_events(path):
            match event:
                case EvaluationBegun(version=version, number=number) if version <= step:
                    numbers.add(number)
                case EvaluationBegun(number=number) | Evaluated(row=RowId(epoch=number)):
                    pass
                case Checkpointed(step=written) if written == checkpoint and line > last_line:
                    checkpointed = [event]
                    continue
                case _:
                    continue
            if line > last_line and number in numbers:
                found.append(event)
    return checkpointed, found


def _end_of_last_line(path: Path) -> int:
    """Bytes of a journal up to the end of its last whole line."""
    end = os.path.getsize(path)
    with path.open("rb") as file:
        while end:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            block = file.read(end - start)
            if (at := block.rfind(b"\n")) >= 0:
                return start + at + 1
            end = start
    return 0


def account_dict(state: HubState) -> dict[str, int | bool]:
    """The accounting identity of a state, for print and file."""
    return {**asdict(state.account), "in_flight": state.in_flight, "holds": state.is_balanced}
