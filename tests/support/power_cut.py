"""Power cuts: what they would leave in a folder at each system call of some code."""

import io
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import pytest


class PowerCuts:
    """While it is entered, copies a folder before each system call that writes, and once more at the end: `left`.

    Each state is there twice: with all bytes, and without those that were not synced. Names are on the disk at
    once in both; `lost_names` are those at the end whose folder was not synced since. Calls of extensions, such as those of safetensors, count as one.
    """

    def __init__(self, folder: Path, copies: Path) -> None:
        self._folder = folder
        self._copies = copies
        self._synced: dict[int, bytes] = {}
        self._named: set[tuple[Path, int]] = set()
        """The names on the disk, with the numbers of their files."""
        self._patch = pytest.MonkeyPatch()
        self.left: list[Path] = []

    def __enter__(self) -> Self:
        self._synced = {file.stat().st_ino: file.read_bytes() for file in self._files(self._folder)}
        self._named = self._names(self._folder.rglob("*"))
        sync = os.fsync

        def fsync(descriptor: int) -> None:
            sync(descriptor)
            file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if file.is_dir():
                self._named = {name for name in self._named if name[0].parent != file} | self._names(file.iterdir())
            elif file.is_file():
                self._synced[file.stat().st_ino] = file.read_bytes()

        self._patch.setattr(os, "fsync", fsync)
        sys.setprofile(self._before_call)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.setprofile(None)
        self._patch.undo()
        self._copy()

    def lost_names(self) -> list[Path]:
        """Files and folders that a power cut would take now, since their names are not on the disk."""
        return sorted(path for path, _ in self._names(self._folder.rglob("*")) - self._named)

    @staticmethod
    def _names(paths: Iterable[Path]) -> set[tuple[Path, int]]:
        return {(path, path.stat().st_ino) for path in paths}

    def _before_call(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and (
            getattr(function, "__module__", "") == "posix" or isinstance(function.__self__, io.IOBase)
        ):
            name = function.__name__
            if name in {
                "write",
                "flush",
                "close",
                "fsync",
                "replace",
                "rename",
                "link",
                "unlink",
                "truncate",
                "ftruncate",
            }:
                self._copy()

    def _copy(self) -> None:
        whole = self._copies / f"{len(self.left)}-whole"
        synced = self._copies / f"{len(self.left)}-synced"
        for copy in (whole, synced):
            shutil.copytree(self._folder, copy)
            self.left.append(copy)
        present: dict[int, bytes] = {}
        for file in self._files(self._folder):
            number = file.stat().st_ino
            present[number] = self._synced.get(number, b"")
            (synced / file.relative_to(self._folder)).write_bytes(present[number])
        self._synced = present  # a file that was removed gives its number to another

    @staticmethod
    def _files(folder: Path) -> list[Path]:
        return [path for path in folder.rglob("*") if path.is_file()]
