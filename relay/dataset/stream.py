"""Prompts of a data set that is read as it is used, over the network or from files: `data.streaming`.

A thread appends the rows of the stream to a file of the run folder, ahead of the position in the data. Rows are shuffled in blocks of
`data.buffer_size`, each by a permutation drawn from the seed, so position and seed alone determine the row, as for other sets.
The library's own shuffle buffer loses rows when it is resumed, so it is not used; its order of the files of each epoch is.
"""

import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...comm.disk import say
from ...comm.errors import DiskFull, SettingError
from ...comm.messages.base import GroupId
from ...comm.recipe import DataSettings
from .order import PromptSource
from .prompt_rows import in_form
from .rows import as_json
from .stream_file import MARK, STREAM_FILE, Mark, StreamFile
from .tables import load_table

_ROWS_AT_ONCE, _SECONDS_AT_ONCE = 256, 0.5
"""Rows are written after so many, or so long."""
_POLL_S = 0.05
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 16.0
"""Before a stream that failed is opened again; the pause doubles while no row comes."""
_CLOSE_S = 5.0


class StreamedPrompts(PromptSource):
    """The rows of the stream, numbered over all epochs, each once in an epoch."""

    sizes = (0,)
    whole_turn = sys.maxsize
    """Known once the first epoch was read."""

    def __init__(self, settings: DataSettings, seed: int, run_dir: Path, deadline_s: float) -> None:
        """`deadline_s` bounds the time without a row while the run needs one. Reads and writes nothing before `start`."""
        self._settings = settings
        self._block_rows = settings.buffer_size if settings.shuffle else 1
        self._seed = seed
        self._path = run_dir / STREAM_FILE
        self._deadline_s = deadline_s
        self._cursor = 0
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, int))

    def start(self, cursor: int) -> None:
        """Read the stream from now on. Raises `SettingError` for another stream than the run began with, or a file that lacks its rows."""
        settings = self._settings
        names = ("subset", "split", "shuffle", "buffer_size")
        order = {f"data.{name}": getattr(settings, name) for name in names}
        order |= {"data.path": settings.paths[0], "run.seed": self._seed}
        self._file = StreamFile(self._path, order, self._deadline_s)
        self._rows = in_form(self._file, settings)
        self._cursor = cursor
        if cursor and self._block(cursor - 1) is None:
            num_rows = len(self._file)
            self._file.close()
            raise SettingError(
                f"run.dir: {self._path} has {num_rows} rows, fewer than the run has used; set another run.dir"
            )
        self._reader = StreamReader(self._open, self._file, self._is_short, settings.paths[0], self._deadline_s)
        self._reader.start()

    def stop(self) -> None:
        self._reader.stop()

    def close(self) -> None:
        self._reader.close()

    def group_at(self, cursor: int) -> GroupId | None:
        self._cursor = max(cursor, self._cursor)
        if (block := self._block(cursor)) is None:
            self._reader.check()
            return None
        if len(self._file.epochs) > 1:
            self.whole_turn = 2 * self._file.epochs[1]
        epoch, start, end = block
        if not self._settings.shuffle:
            return GroupId(epoch, cursor)
        if self._order[0] != start:
            self._order = (start, np.random.default_rng([self._seed, start]).permutation(end - start))
        return GroupId(epoch, start + int(self._order[1][cursor - start]))

    def row(self, group: GroupId) -> msgspec.Raw:
        return msgspec.Raw(self._rows[group.prompt])

    def row_name(self, group: GroupId) -> str:
        return f"row {group.prompt + 1} of {STREAM_FILE} (its lines with {MARK.decode()} not counted)"

    def _block(self, cursor: int) -> tuple[int, int, int] | None:
        """Epoch, first row and end of the rows that are shuffled together with a position's; None before all of them are read."""
        # The reader notes the end of an epoch before the rows behind it, so the rows are counted first.
        num_rows, epochs = len(self._file), tuple(self._file.epochs)
        epoch = bisect_right(epochs, cursor) - 1
        start = cursor - (cursor - epochs[epoch]) % self._block_rows
        end = start + self._block_rows
        if epoch + 1 < len(epochs):
            return epoch, start, min(end, epochs[epoch + 1])
        return (epoch, start, end) if end <= num_rows else None

    def _is_short(self) -> bool:
        """Whether rows are missing in the block in use, or in the next one; of a small set, in the next epoch."""
        if (block := self._block(self._cursor)) is None:
            return True
        epoch, _, end = block
        ahead = self._settings.buffer_size - self._block_rows
        return len(self._file.epochs) <= epoch + 2 and self._block(end + ahead) is None

    def _open(self, mark: Mark) -> Any:
        """The library's data set, at a place."""
        stream = load_table(self._settings, self._settings.paths[0])
        if self._settings.shuffle:  # the files of each epoch come in an order of their own
            stream.set_epoch(1 + int(np.random.default_rng([self._seed, mark.epoch]).integers(1 << 31)))
        if mark.state is not None:
            stream.load_state_dict(mark.state)
        return stream


class StreamReader:
    """A thread that appends rows to the file of a stream while `is_short` says that it has too few.

    An error of the stream, such as a lost connection, is printed, and the stream is opened again where the file ends. The rows
    that it repeats there must be those of the file.
    """

    def __init__(
        self,
        open_at: Callable[[Mark], Any],
        file: StreamFile,
        is_short: Callable[[], bool],
        name: str,
        deadline_s: float,
    ) -> None:
        """`open_at` gives the data set of the library at a place, `deadline_s` bounds the waits of `check`."""
        self._open_at, self._file, self._is_short = open_at, file, is_short
        self._name = name
        self._deadline_s = deadline_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream reader", daemon=True)
        self._failure = self._error = ""
        self._num_repeated = 0
        """Most rows that were read again in one attempt since the last new one."""
        self._seen = ((0, 0, 0), 0.0)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Read no more rows, and wait no longer for room on the disk."""
        self._closing.set()
        self._file.stop_waiting()

    def close(self) -> None:
        """End the thread, and close the file. A thread that waits for the network is left; it writes nothing more."""
        self.stop()
        self._thread.join(_CLOSE_S)
        self._file.close()

    def check(self) -> None:
        """Call it while a row is missing. Raises `SettingError` once none has come for the deadline, or none can come."""
        if self._failure:
            raise SettingError(self._failure)
        progress, now = (len(self._file), len(self._file.epochs), self._num_repeated), time.monotonic()
        if self._seen[0] != progress or not self._seen[1]:
            self._seen = progress, now
        elif now - self._seen[1] > self._deadline_s:
            why = f": {self._error}" if self._error else ""
            raise SettingError(f"data.path: the stream {self._name} has given no row for {self._deadline_s:g} s{why}")

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._closing.is_set():
            num_rows = len(self._file)
            try:
                self._read_epoch()
            except (DiskFull, _StreamChanged) as error:
                self._failure = str(error)
                return
            except Exception as error:  # noqa: BLE001 - of the library, the network or the data: the next attempt may succeed
                if self._closing.is_set():
                    return
                pause_s = _FIRST_PAUSE_S if len(self._file) > num_rows else min(2 * pause_s, _LONGEST_PAUSE_S)
                self._error = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                say(f"data.path: the stream {self._name} fails ({self._error}); it is opened again in {pause_s:g} s")
                self._closing.wait(pause_s)

    def _read_epoch(self) -> None:
        """Read rows from the end of the file to that of its epoch, as they are wanted."""
        epoch = self._file.mark.epoch
        stream, rows, place = self._open_at_end()
        while self._is_wanted():
            block: list[bytes] = []
            try:
                is_last = not self._read_block(rows, block)
            finally:
                if block:
                    self._file.append(place, block)
                    self._num_repeated = 0
            place = Mark(epoch, stream.state_dict())
            if is_last:
                if len(self._file) == self._file.epochs[-1]:
                    raise _StreamChanged(f"data.path: {self._name} has no rows")
                self._file.append(Mark(epoch + 1))
                return

    def _read_block(self, rows: Iterator[bytes], block: list[bytes]) -> bool:
        """Add rows to a block, which keeps those before an error. False at the end of the rows."""
        until = time.monotonic() + _SECONDS_AT_ONCE
        while len(block) < _ROWS_AT_ONCE and time.monotonic() < until and not self._closing.is_set():
            if (row := next(rows, None)) is None:
                return False
            block.append(row)
        return True

    def _is_wanted(self) -> bool:
        """Wait until rows are wanted; false at the end."""
        while not self._closing.is_set():
            if self._is_short():
                return True
            self._closing.wait(_POLL_S)
        return False

    def _open_at_end(self) -> tuple[Any, Iterator[bytes], Mark]:
        """The stream, its rows behind the last one of the file, and their place. From the epoch's beginning if the mark misleads."""
        file = self._file
        epoch = file.mark.epoch
        for mark, first in ((file.mark, file.num_marked), (Mark(epoch), file.epochs[epoch])):
            try:
                stream = self._open_at(mark)
                rows = map(as_json, stream)
                if not self._repeats(rows, first):
                    continue
            except (OSError, SettingError):
                raise
            except Exception:
                if mark.state is None:
                    raise
                continue  # the library cannot read the state, as after a change of its version
            is_new = first == len(file)  # a stream that has given no row does not know its state
            return stream, rows, mark if is_new else Mark(epoch, stream.state_dict())
        raise _StreamChanged(
            f"data.path: the stream {self._name} has other rows than those that the run has used; set another run.dir"
        )

    def _repeats(self, rows: Iterator[bytes], first: int) -> bool:
        """Whether rows are those of the file from `first` to its end."""
        for number in range(first, len(self._file)):
            if self._closing.is_set() or next(rows, None) != self._file[number]:
                return False
            self._num_repeated = max(self._num_repeated, number - first + 1)
        return True


class _StreamChanged(SettingError):
    """The stream can give no more rows of the data set that the run began with."""
