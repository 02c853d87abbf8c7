"""Copies of the training state in the run folder. The supervisors of a run that fails leave there what they have in memory.

    memory/step_N/actor-I.state      a page with the head, then the bytes of the slot that rank I's supervisor held

A file is there whole or not at all, under its name. The copies of a step can be used if those of all ranks are there, of one start of
the run. Without torch, since supervisors write them.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from ...comm.disk import make_folders
from ..checkpoints import number_of, sync_folder, write_durably

FOLDER = "memory"
HEAD_BYTES = 4096
_PIECE_BYTES = 64 << 20


class CopyHead(msgspec.Struct, frozen=True):
    """The head of a file: which copy of which state it has."""

    step: int
    """The number of steps that the state has trained."""
    digest: str
    """Of the tensors in the bytes, as their layout has them; 32 hex digits."""
    fingerprint: int
    """Of that layout."""
    num_bytes: int
    num_ranks: int
    """The actor ranks whose copies make up the state."""
    start: str
    """Tells this start of the run from others."""


class CopiesOnDisk:
    """The copies in a run folder."""

    def __init__(self, run_dir: Path) -> None:
        self.root = run_dir / FOLDER

    def path(self, step: int) -> Path:
        """The folder of a step."""
        return self.root / f"step_{step}"

    def file(self, step: int, rank: int) -> Path:
        return self.path(step) / f"actor-{rank}.state"

    def steps(self) -> list[int]:
        """The steps that have a folder, whole or not, in order."""
        return sorted(step for path in self.root.glob("step_*") if (step := number_of(path.name)) >= 0)

    def write(
        self,
        rank: int,
        head: CopyHead,
        content: np.ndarray,
        by: str = "",
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Write a rank's copy, uint8 [num_bytes], and sync it. Raises `OSError`; nothing is left of a file that does not fit.

        by: who writes it, since two may write the same.
        is_wanted: asked when the file is written, before it gets its name.
        """
        run_dir = self.root.parent
        if shutil.disk_usage(run_dir).free < self._missing_bytes(head):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        folder = make_folders(run_dir, FOLDER, self.path(head.step).name)
        new = folder / f"actor-{rank}.by-{by}"
        write_durably(new, msgspec.json.encode(head).ljust(HEAD_BYTES), content.data)
        if not is_wanted():
            new.unlink()
            with suppress(OSError):  # other files are there
                folder.rmdir()
                folder.parent.rmdir()
            return
        new.replace(self.file(head.step, rank))
        for each in (folder, folder.parent, run_dir):
            sync_folder(each)

    def _missing_bytes(self, head: CopyHead) -> int:
        """The bytes that all ranks have still to write of this step in this start of the run. They write on one disk at once.

        What one of them has written is as much less free. So it is the same for all of them, and none fills the disk for the others. Each
        writes its newest copy first. So the room for as many copies of an older step is enough for the newer ones that are missing, too.
        """
        size = HEAD_BYTES + head.num_bytes
        return sum(size - min(size, self._written_bytes(head, rank)) for rank in range(head.num_ranks))

    def _written_bytes(self, head: CopyHead, rank: int) -> int:
        """The size of a rank's file of the same step and start, under whatever name it is written."""
        sizes = [0]
        for path in self.path(head.step).glob(f"actor-{rank}.*"):
            with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError), path.open("rb") as file:
                if _read_head(file).start == head.start:
                    sizes.append(os.fstat(file.fileno()).st_size)
        return max(sizes)

    def head(self, step: int, rank: int) -> CopyHead | None:
        """The head of a rank's file; None if the file is missing or not whole."""
        try:
            with self.file(step, rank).open("rb") as file:
                head = _read_head(file)
                size = os.fstat(file.fileno()).st_size
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return head if (head.step, HEAD_BYTES + head.num_bytes) == (step, size) else None

    def read(self, step: int, rank: int, content: np.ndarray) -> Iterator[int]:
        """Read the bytes of a rank's copy into an array, uint8 [num_bytes]; yields the size of each piece. Raises `OSError`."""
        view = content.data
        with self.file(step, rank).open("rb", buffering=0) as file:
            file.seek(HEAD_BYTES)
            at = 0
            while at < len(view):
                if not (size := file.readinto(view[at : at + _PIECE_BYTES])):
                    raise OSError(errno.EIO, "the file has become shorter")
                at += size
                yield size

    def newest(self, after: int, most: int, num_ranks: int) -> tuple[int | None, list[str]]:
        """The newest step after `after` and up to `most` with a whole copy of each rank; and what is wrong with newer ones.

        It reads the heads alone.
        """
        problems: list[str] = []
        for step in reversed(self.steps()):
            if not after < step <= most:
                continue
            if not (problem := self._problem(step, num_ranks)):
                return step, problems
            problems.append(f"{FOLDER}/{self.path(step).name} {problem}")
        return None, problems

    def remove(self, steps: Iterable[int]) -> None:
        """Remove the copies of these steps."""
        for step in set(self.steps()) & {*steps}:
            shutil.rmtree(self.path(step), ignore_errors=True)
        if not any(self.root.glob("*")):
            shutil.rmtree(self.root, ignore_errors=True)

    def _problem(self, step: int, num_ranks: int) -> str:
        heads = [self.head(step, rank) for rank in range(num_ranks)]
        found = [head for head in heads if head is not None]
        if len(found) < num_ranks:
            return f"lacks a whole {self.file(step, heads.index(None)).name}"
        if found[0].num_ranks != num_ranks:
            return f"has the copies of {found[0].num_ranks} actor ranks, not {num_ranks}"
        if len({(head.start, head.num_ranks) for head in found}) > 1:
            return "has copies of several starts of the run"
        return ""


def _read_head(file: IO[bytes]) -> CopyHead:
    """Raises `msgspec.DecodeError` and `UnicodeDecodeError` if there is none."""
    return msgspec.json.decode(file.read(HEAD_BYTES).rstrip(), type=CopyHead)
