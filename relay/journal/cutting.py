"""Cuts the journal of a run that is resumed where the run continues."""

import logging
import os
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...comm.disk import REMEDY, describe_unwritable, is_unwritable
from ...comm.errors import DiskFull
from ...comm.messages.base import RowId
from ..checkpoints import sync_folder
from .events import Checkpointed, Evaluated, EvaluationBegun, Event, Opened, Trained
from .files import BLOCK_BYTES, JournalError, named_by_place, parts_of, read_events
from .journal import Journal
from .snapshots import snapshots_of

_log = logging.getLogger(__name__)


class KnownSteps(NamedTuple):
    """The optimizer steps of a journal, as far as it can be read."""

    places: dict[int, int]
    """For each number of trained steps, the place in the journal after the line of the last one."""
    checkpoints: set[int]
    """The numbers of steps after which checkpoints were written."""
    problem: str = ""
    """Why the lines from some place on cannot be read; empty if all can."""

    @property
    def num_trained(self) -> int:
        return max(self.places, default=0)


def steps_in(journal: Path) -> KnownSteps:
    """The trained steps of a journal, and its checkpoints; none of a file that is missing.

    A checkpoint is written while training goes on, so its own line may be much later than its step's. Reading ends at a damaged
    line: it is younger than the checkpoints before it, whose lines were synced to the disk. Before the newest snapshot that the next
    hub uses, only the lines of steps are read.
    """
    known = KnownSteps({}, set())
    if not journal.exists():
        return known
    try:
        folded = next((place for place, _ in snapshots_of(journal)), 0)
        for place, event in chain(
            read_events(journal, 0, folded, (Trained, Checkpointed)), read_events(journal, folded)
        ):
            if isinstance(event, Trained):
                known.places[event.step + 1] = place
            elif isinstance(event, Checkpointed) and event.step in known.places:
                known.checkpoints.add(event.step)
    except JournalError as error:
        _log.warning("%s; the lines from there on are not used", error)
        return known._replace(problem=str(error))
    return known


def cut_after(journal: Path, step: int, checkpoint: int | None, rest: Path) -> None:
    """Cut a journal after its first `step` optimizer steps; the lines after them go to the file `rest`.

    The event of the checkpoint, and those of evaluations of version `step` and earlier ones, stay true and stay in it. A new file
    takes the place of the old one: a power cut leaves one of them. Raises `JournalError` if the journal has not so many steps, or
    is in use, and `DiskFull`.
    """
    if (place := steps_in(journal).places.get(step)) is None:
        raise JournalError(f"{journal} has no step {step}")
    new = journal.with_name(f"{journal.name}.new")
    with closing(Journal(journal)):  # locked: no hub of the run before writes any more
        parts = [part for part in parts_of(journal) if part.end >= place or part.path == journal]
        cut = min(parts[0].end, place) - parts[0].start
        _write(new, [(parts[0].path, 0, cut)], _true_beyond(journal, step, checkpoint, place))
        try:
            _write(rest, [(parts[0].path, cut, None), *((part.path, 0, None) for part in parts[1:])])
        except DiskFull:
            new.unlink()
            raise
        for path in [path for end, path in named_by_place(journal, "state").items() if end > place]:
            path.unlink()
        new.replace(journal)
        sync_folder(journal.parent)
        for part in parts[:-1]:  # the new file says that it begins where the first of them did
            part.path.unlink()


def _write(into: Path, pieces: Sequence[tuple[Path, int, int | None]], events: Sequence[Event] = ()) -> None:
    """Write pieces of files, each from a byte to another one, and events after them, and sync the file.

    On a full disk nothing is left of it, and `DiskFull` is raised.
    """
    try:
        with into.open("wb") as copy:
            for path, start, end in pieces:
                with path.open("rb") as source:
                    source.seek(start)
                    while block := source.read(BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - source.tell())):
                        copy.write(block)
            copy.writelines(msgspec.json.encode(event) + b"\n" for event in events)
            copy.flush()
            os.fsync(copy.fileno())
    except OSError as error:
        into.unlink(missing_ok=True)
        if not is_unwritable(error):
            raise
        raise DiskFull(f"{describe_unwritable(into)}; {REMEDY}, the run can be resumed as before") from error


def _true_beyond(journal: Path, step: int, checkpoint: int | None, place: int) -> list[Event]:
    """The events after a place that stay true: of a checkpoint, and of evaluations of versions up to `step`.

    With evaluations, or if a later start had other facts of the data, a start comes before them: it has the newest facts, and what was
    under way is not leased any more.
    """
    numbers: set[int] = set()
    checkpointed: list[Event] = []
    found: list[Event] = []
    opened: list[tuple[int, Opened]] = []
    with suppress(JournalError):  # `steps_in` has said so
        for end, event in read_events(journal, kinds=(Opened, EvaluationBegun, Evaluated, Checkpointed)):
            is_beyond = end > place
            match event:
                case Opened():
                    opened.append((end, event))
                case EvaluationBegun(version=version, number=number) if version <= step:
                    numbers.add(number)
                    found += [event] * is_beyond
                case Evaluated(row=RowId(epoch=number)) if number in numbers:
                    found += [event] * is_beyond
                case Checkpointed(step=written) if written == checkpoint and is_beyond:
                    checkpointed = [event]
                case _:
                    pass
    before = [event for end, event in opened if end <= place]
    if before and (found or opened[-1][1] != before[-1]):
        found.insert(0, msgspec.structs.replace(opened[-1][1], epoch=before[-1].epoch + 1, run_id=""))
    return [*checkpointed, *found]
