"""The lines of a growing `samples.jsonl`: figures of all of them in memory, one of them whole on request."""

import os
import stat
import threading
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

MOST_ROWS = 5000
"""Rows of one answer."""
_BLOCK = 1 << 24
_SHOWN = 120
"""Characters of a text in the list."""


class _Line(msgspec.Struct, frozen=True, gc=False):
    """The fields of a line that the list and the search need; the others are not decoded."""

    step: int
    group: str
    sample: int
    prompt: str
    response: str
    reward: float
    staleness: int
    finish: str
    num_tokens: int
    advantage: float | None = None
    num_turns: int = 1
    num_calls: int = 0
    num_failed_calls: int = 0
    turns: list[dict[str, Any]] = []

    def row(self) -> bytes:
        """An entry of the list, in JSON: the fields of `COLUMNS`."""
        call = next(
            (
                f"{c['name']}({_words(c['arguments'])}) \u2192 {c['result']}"
                for t in self.turns
                for c in t.get("calls", ())
            ),
            "",
        )
        figures = (
            self.step,
            self.group,
            self.sample,
            self.reward,
            self.advantage,
            self.staleness,
            self.num_tokens,
            self.finish,
        )
        counts = (self.num_turns, self.num_calls, self.num_failed_calls)
        return msgspec.json.encode((*figures, *counts, self.prompt[-_SHOWN:], self.response[:_SHOWN], call[:_SHOWN]))


COLUMNS = (
    "step", "group", "sample", "reward", "advantage", "staleness", "length", "finish", "turns", "calls", "failed", "prompt", "response",
    "call",
)  # fmt: skip


class Rows(NamedTuple):
    """Entries of the list from `first` on. `generation` changes where the file is another one, and the numbers of lines with it."""

    generation: int
    first: int
    total: int
    rows: list[bytes]


class Gone(Exception):
    """The line was asked for by its number in a file that is not there any more."""


class SampleIndex:
    """Reads what is new in the file whenever it is asked; several threads may ask."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._generation = 1
        self._descriptor = -1
        self._forget()

    def rows(self, first: int, generation: int) -> Rows:
        """Entries from line `first` of a generation on, at most `MOST_ROWS`; those from the first on if it is not the present one."""
        with self._lock:
            self._refresh()
            first = first if generation == self._generation and 0 <= first <= len(self._rows) else 0
            return Rows(self._generation, first, len(self._rows), self._rows[first : first + MOST_ROWS])

    def search(self, words: str, generation: int) -> list[int]:
        """The numbers of the lines whose prompt or response has these words, in any case. Raises `Gone`."""
        with self._lock:
            self._check(generation)
            texts = self._texts[:]
        wanted = words.casefold()
        return [number for number, text in enumerate(texts) if wanted in text]

    def line(self, number: int, generation: int) -> bytes:
        """A whole line. Raises `Gone`."""
        with self._lock:
            self._check(generation)
            if not 0 <= number < len(self._spans):
                raise Gone
            start, length = self._spans[number]
            line = os.pread(self._descriptor, length, start)
        if len(line) < length:  # it was cut off: a resumed run will write the step again
            raise Gone
        return line

    def close(self) -> None:
        with self._lock:
            self._forget()

    def _check(self, generation: int) -> None:
        if generation != self._generation:
            raise Gone

    def _forget(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._end = 0
        self._digest = 0
        """Of the last line that was read."""
        self._rows: list[bytes] = []
        self._texts: list[str] = []
        self._spans: list[tuple[int, int]] = []
        """Where each line begins, and its length."""

    def _refresh(self) -> None:
        """Read the lines that have come, all of them if it is another file or was cut off meanwhile."""
        if not self._is_same():
            self._generation += bool(self._spans)
            self._forget()
            try:
                self._descriptor = open_regular(self._path)
            except OSError:  # there is none yet
                return
        rest = b""
        at = self._end
        while block := os.pread(self._descriptor, _BLOCK, at):
            at += len(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self._add(line)

    def _add(self, line: bytes) -> None:
        span = (self._end, len(line))
        self._end += len(line) + 1
        try:
            found = msgspec.json.decode(line, type=_Line)
            row = found.row()
        except (msgspec.MsgspecError, TypeError, KeyError, AttributeError):
            return  # not a line of ours
        self._digest = zlib.crc32(line)
        self._spans.append(span)
        self._rows.append(row)
        self._texts.append(f"{found.prompt}\n{found.response}".casefold())

    def _is_same(self) -> bool:
        """Whether the open file is still the one of that name, with what was read of it."""
        if self._descriptor < 0:
            return False
        try:
            is_named = os.path.samestat(os.fstat(self._descriptor), os.stat(self._path, follow_symlinks=False))
        except OSError:
            return False
        if not is_named or os.fstat(self._descriptor).st_size < self._end:
            return False
        if not self._spans:
            return True
        start, length = self._spans[-1]
        return zlib.crc32(os.pread(self._descriptor, length, start)) == self._digest


def open_regular(path: Path) -> int:
    """A descriptor to read a file that is no link, pipe or device, none of which is a run's own. Raises `OSError`, and never waits."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor


def _words(arguments: Any) -> str:
    """The arguments of a call, in short."""
    values = (
        [f"{name}={value}" for name, value in arguments.items()] if isinstance(arguments, dict) else map(str, arguments)
    )
    return ", ".join(values)
