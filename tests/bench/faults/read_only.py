"""Folders that cannot be written for a while: a read-only mount over each of them. Files that are open already are not touched."""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

_BIND, _REMOUNT, _READ_ONLY, _LAZILY = 4096, 32, 1, 2


def may_mount(folder: Path) -> bool:
    """Whether this process may mount something over a folder."""
    try:
        with read_only([folder]):
            return True
    except OSError:
        return False


@contextmanager
def read_only(folders: Sequence[Path]) -> Iterator[None]:
    """The folders are read-only while the body runs. Raises `OSError` where this process may not mount."""
    with ExitStack() as stack:
        for folder in folders:
            _mount(folder, folder, _BIND)
            stack.callback(_unmount, folder)
            _mount(folder, folder, _BIND | _REMOUNT | _READ_ONLY)
        yield


def _mount(source: Path, target: Path, flags: int) -> None:
    _check(_libc().mount(os.fsencode(source), os.fsencode(target), None, flags, None), target)


def _unmount(target: Path) -> None:
    _check(_libc().umount2(os.fsencode(target), _LAZILY), target)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_void_p)
    return libc


def _check(code: int, path: Path) -> None:
    if code:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
