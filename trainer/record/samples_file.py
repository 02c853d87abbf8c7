"""`samples.jsonl` in the run folder: a line for each sample, with the lines of a step one after the other."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ...comm.disk import AppendFile, is_unwritable

SAMPLES_FILE = "samples.jsonl"
MOST_BYTES = 1 << 28
"""Size at which steps are removed from the file."""
_HEAD = b'{"step":'


def step_of(line: bytes) -> int:
    """The step of a whole line, counted from 1, without a look at the rest of it."""
    return int(line[len(_HEAD) : line.index(b",")])


def whole_lines(path: Path, is_wanted: Callable[[int], bool]) -> Iterator[bytes]:
    """The lines of these steps, up to one without an end: a killed process may have left it. No file has no lines."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if not (line.startswith(_HEAD) and line.endswith(b"\n")):
                return
            if is_wanted(step_of(line)):
                yield line


class SamplesFile:
    """Each step is there once and whole. A file of `most_bytes` is thinned: a half of the steps, evenly spread, and the last one stay.

    Where that frees too little, or the disk has no room for the new file, the next attempt waits until the file has grown by half.
    """

    def __init__(self, run_dir: Path, first_step: int, deadline_s: float, most_bytes: int = MOST_BYTES) -> None:
        """Removes the lines of steps from `first_step` on, counted from 0: they will be written again. `deadline_s` is for a full disk."""
        self.path = run_dir / SAMPLES_FILE
        self._new = self.path.with_suffix(".new")
        self._new.unlink(missing_ok=True)
        self._deadline_s = deadline_s
        self._most_bytes = self._thins_at = most_bytes
        if self.path.exists():
            num_bytes = sum(len(line) for line in whole_lines(self.path, lambda step: step <= first_step))
            with self.path.open("r+b") as file:
                file.truncate(num_bytes)
        self._file: AppendFile | None = None

    def write(self, lines: Iterable[bytes]) -> None:
        """Write the lines of the next step, each a JSON object whose first key is `step`."""
        self._file = self._file or AppendFile(self.path, self._deadline_s)
        self._file.append(b"".join(line + b"\n" for line in lines))
        if self._file.num_bytes > self._thins_at:
            self._thin()
            num_bytes = self.path.stat().st_size
            self._thins_at = max(self._most_bytes, num_bytes + num_bytes // 2)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _thin(self) -> None:
        """Keep every second step, or fourth, and so on: as many as fit into half of the size. Without room on the disk all stay."""

        def stays(step: int) -> bool:
            return step % stride == 1 or step == last

        sizes: defaultdict[int, int] = defaultdict(int)
        for line in whole_lines(self.path, lambda _: True):
            sizes[step_of(line)] += len(line)
        last = max(sizes)
        stride = 2
        while stride < last and sum(sizes[step] for step in sizes if step % stride == 1) > self._most_bytes // 2:
            stride *= 2
        num_kept = sum(size for step, size in sizes.items() if stays(step))
        disk = os.statvfs(self.path)
        if num_kept == sum(sizes.values()) or num_kept > disk.f_bavail * disk.f_frsize:
            return
        try:
            with self._new.open("wb") as file:
                file.writelines(whole_lines(self.path, stays))
        except OSError as error:
            self._new.unlink(missing_ok=True)
            if not is_unwritable(error):
                raise
            return
        self.close()
        self._new.replace(self.path)
