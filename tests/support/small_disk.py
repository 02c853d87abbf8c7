"""A disk of a few megabytes that a test can fill."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, megabytes: int, inodes: int = 0) -> Iterator[Path]:
    """`folder` as a tmpfs of this size, with so many inodes or without a limit; skips the test where this user may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,nr_inodes={inodes}", "headrace-test", str(folder)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def use_up_inodes(disk: Path) -> list[Path]:
    """Make empty files until a disk has no inode for another; returns them, to be deleted."""
    files: list[Path] = []
    with suppress(OSError):
        while True:
            path = disk / f"file-{len(files)}"
            path.touch(exist_ok=False)
            files.append(path)
    return files


def fill(disk: Path) -> Path:
    """Use up all room of a disk; returns the file that does, to be deleted."""
    path = disk / "ballast"
    with path.open("ab", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                size = size if file.write(bytes(size)) == size else size // 2
            except OSError:
                size //= 2
    return path
