"""The hub's journal: every decision as one JSON line, written before it takes effect.

`launch/audit.py` prints what a journal says.
"""

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import msgspec

from ...comm.disk import AppendFile, DiskReserve, describe_full, is_full
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
            raise JournalError(
                f"{self.path} cannot be written: {error}; make room there, or set another run.dir"
            ) from error
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
            self.full, self._file.deadline_s = str(error), _LAST_WAIT_S
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
    state, number = HubState(), 0
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


def checkpoints_in(path: Path) -> dict[int, int]:
    """The checkpoints that a journal knows: by their step, the number of the line of the last optimizer step before it.

    A checkpoint is written while training goes on, so its own line may be much later. Reading ends at a damaged line: it
    is younger than the checkpoints before it, whose lines were synced to the disk.
    """
    trained, found = dict[int, int](), dict[int, int]()
    try:
        for number, event in read_events(path):
            if isinstance(event, Trained):
                trained[event.step + 1] = number
            elif isinstance(event, Checkpointed) and event.step in trained:
                found[event.step] = trained[event.step]
    except JournalError as error:
        _log.warning("%s; the lines from there on are not used", error)
    return found


def cut_at_checkpoint(path: Path, step: int, into: Path) -> list[Event]:
    """Write the journal up to the last optimizer step before a checkpoint into another file; the rest to `<name>.discarded-<n>`.

    Returns the events that the next writer appends: the checkpoint's, and those of evaluations of its version and earlier
    ones, which stay true. Raises `JournalError` if the journal does not know the checkpoint.
    """
    if (last_line := checkpoints_in(path).get(step)) is None:
        raise JournalError(f"{path} has no checkpoint of step {step}")
    checkpoint = Checkpointed(step=step, path=str(path.parent / "checkpoints" / f"step_{step}"))
    kept = [checkpoint, *_evaluations_beyond(path, step, last_line)]
    with path.open("rb") as file:
        kept_bytes = sum(len(line) for line in islice(file, last_line))
    spare = 1 + len(list(path.parent.glob(f"{path.name}.discarded-*")))
    _copy_bytes(path, 0, kept_bytes, into)
    try:
        _copy_bytes(path, kept_bytes, path.stat().st_size, path.with_name(f"{path.name}.discarded-{spare}"))
    except DiskFull:
        into.unlink()
        raise
    return kept


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
        if not is_full(error):
            raise
        raise DiskFull(f"{describe_full(into)}; make room there, the run can be resumed as before") from error


def _evaluations_beyond(path: Path, step: int, last_line: int) -> list[Event]:
    """The events after a line that belong to evaluations of versions up to `step`."""
    numbers: set[int] = set()
    found: list[Event] = []
    with suppress(JournalError):  # `checkpoints_in` has said so
        for line, event in read_events(path):
            match event:
                case EvaluationBegun(version=version, number=number) if version <= step:
                    numbers.add(number)
                case EvaluationBegun(number=number) | Evaluated(row=RowId(epoch=number)):
                    pass
                case _:
                    continue
            if line > last_line and number in numbers:
                found.append(event)
    return found


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
