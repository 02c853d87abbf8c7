"""The files of a journal, which together are one history of lines; a place in it is the number of its bytes before.

    journal.jsonl        the newest lines: the only file that is written
    journal/N.jsonl      older lines, from byte N of the history on
    journal/N.state      the state after the first N bytes (`snapshots.py`)

Each file says in its first line where it begins (`Continued`), unless that is byte 0. A part in the folder that does not begin before
`journal.jsonl` is not in the history: a hub died while it began the file, or a resumed run has given the part up.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import xxhash

from ...comm.errors import HeadraceError
from .events import Continued, Event, decode_event

BLOCK_BYTES = 1 << 20
_TAIL_BYTES = 1 << 12


class JournalError(HeadraceError):
    """A journal line is not an event, not a legal one, or cannot be written; the message names the file."""


class Part(NamedTuple):
    """One file of a journal: the bytes of the history from `start` to `end`."""

    path: Path
    start: int
    end: int


def folder_of(journal: Path) -> Path:
    """The folder of a journal's older parts and snapshots; both may be set aside under other names (`NAME.discarded-N`)."""
    return journal.with_name(journal.name.replace(".jsonl", ""))


def named_by_place(journal: Path, kind: str) -> dict[int, Path]:
    """The files `N.kind` in the folder of a journal by their N, in order."""
    found = {int(path.stem): path for path in folder_of(journal).glob(f"*.{kind}") if path.stem.isdecimal()}
    return dict(sorted(found.items()))


def parts_of(journal: Path) -> list[Part]:
    """The files of the history, the oldest first. Raises `JournalError` if the newest one does not say where it begins.

    The newest file is looked at first: a hub may begin another one meanwhile, and then this one is in the folder too.
    """
    with journal.open("rb") as file:
        first = _first_line(file)
        num_bytes = os.fstat(file.fileno()).st_size
    older = [Part(path, start, start + path.stat().st_size) for start, path in named_by_place(journal, "jsonl").items()]
    if older and first is None:
        raise JournalError(f"{journal} has no whole line, and {folder_of(journal)} has the lines before it")
    start = _start(first)
    return [*(part for part in older if part.start < start), Part(journal, start, start + num_bytes)]


@contextmanager
def open_part(part: Part) -> Iterator[IO[bytes]]:
    """A file of the history, after the line that says where it begins.

    If a hub has begun another file since, this one has the name of its place. Raises `JournalError` if it is neither of the two.
    """
    with part.path.open("rb") as file:
        if _start(_first_line(file)) == part.start:
            yield file
            return
    path = folder_of(part.path) / f"{part.start}.jsonl"
    if not path.exists():
        raise JournalError(f"{part.path} does not begin with byte {part.start} of the journal")
    with path.open("rb") as file:
        _first_line(file)
        yield file


def check_order(journal: Path) -> None:
    """Raise `JournalError` if a file of the history was begun after other lines than those of the file before it."""
    for part, following in pairwise(parts_of(journal)):
        with open_part(part) as file, following.path.open("rb") as next_file:
            first = _first_line(next_file)
            is_next = isinstance(first, Continued) and first.after == tail_digest(file, part.end - part.start)
        if not is_next:
            raise JournalError(f"{following.path} was begun after other lines than those of {part.path}")


def tail_digest(file: IO[bytes], num_bytes: int) -> str:
    """xxh3 of the last lines among the first `num_bytes` of a file: other histories have others there, if only by their times."""
    file.seek(max(0, num_bytes - _TAIL_BYTES))
    return xxhash.xxh3_64_hexdigest(file.read(num_bytes - file.tell()))


def read_blocks(journal: Path, start: int = 0, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """The lines between two places of the history, about a megabyte at a time: (place of its first byte, whole lines).

    start, end: places where a line ends; without `end` the newest part is read as far as it has grown. A last line without an end,
    whose writer died, is left out. Raises `JournalError` if a part is missing.
    """
    place = start
    for part, following in pairwise([*parts_of(journal), None]):
        assert part is not None
        if following is not None and part.end <= place:
            continue
        if end is not None and place >= end:
            return
        if part.start > place or following is not None and part.end != following.start:
            missing = min(place, part.start) if part.start > place else part.end
            raise JournalError(
                f"{folder_of(journal)}: the file that begins with byte {missing} of the journal is missing"
            )
        yield from _blocks_of(part, place, end)
        place = part.end


def _blocks_of(part: Part, place: int, end: int | None) -> Iterator[tuple[int, bytes]]:
    with open_part(part) as file:
        file.seek(max(place - part.start, file.tell()))
        place = part.start + file.tell()
        rest = b""
        while block := file.read(BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - place - len(rest))):
            block = rest + block
            num_bytes = block.rfind(b"\n") + 1
            rest = block[num_bytes:]
            if num_bytes:
                yield place, block[:num_bytes]
            place += num_bytes


def read_events(
    journal: Path, start: int = 0, end: int | None = None, kinds: Sequence[type[Event]] = ()
) -> Iterator[tuple[int, Event]]:
    """(place of its line's end, event) between two places of the history; with `kinds` the other lines are not looked at.

    Raises `JournalError` at a line that is not an event.
    """
    heads = [f'{{"event":"{kind.__name__}"'.encode() for kind in kinds]
    for place, lines in read_blocks(journal, start, end):
        for line_start, line_end in _lines_with(heads, lines) if kinds else _all_lines(lines):
            try:
                event = decode_event(lines[line_start:line_end])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise JournalError(f"{line_name(journal, place + line_start)}: {error}") from error
            yield place + line_end, event


def line_name(journal: Path, place: int) -> str:
    """The file and the number of the line that begins at a place of the history, for messages."""
    part = next(part for part in reversed(parts_of(journal)) if part.start <= place)
    with open_part(part) as file:
        file.seek(0)
        number = file.read(place - part.start).count(b"\n") + 1
    return f"{part.path}:{number}"


def _first_line(file: IO[bytes]) -> Event | None:
    """The first event of a file, None without a whole line. Only the line that says where a file begins is read off.

    Raises `JournalError` for a line that is not an event.
    """
    line = file.readline()
    event = None
    if line.endswith(b"\n"):
        try:
            event = decode_event(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise JournalError(f"{file.name}:1: {error}") from error
    if not isinstance(event, Continued):
        file.seek(0)
    return event


def _start(first: Event | None) -> int:
    """Where a file with this first event begins."""
    return first.start if isinstance(first, Continued) else 0


def _all_lines(lines: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each line."""
    ends = accumulate(len(line) + 1 for line in lines[:-1].split(b"\n"))
    return pairwise(chain((0,), ends))


def _lines_with(heads: Sequence[bytes], lines: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each line that begins with one of these words."""
    found = list[int]()
    for head in heads:
        at = lines.find(head)
        while at >= 0:
            if not at or lines[at - 1 : at] == b"\n":
                found.append(at)
            at = lines.find(head, at + 1)
    return ((at, lines.index(b"\n", at) + 1) for at in sorted(found))
