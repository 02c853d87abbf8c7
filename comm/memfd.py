"""Anonymous memory that processes of one host share: this module creates all memfds and opens those of other processes.

Such memory leaves nothing behind after a crash, and ends with the last process that holds it. Others open it through /proc, by
a path that names a process, the number of its descriptor and a token at the head of the memory: the number may by then belong to
another file. The memory is sealed against shrinking, so no other process can take mapped pages away. Without numpy and torch, so
a supervisor stays small.
"""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import PeerGone

HEAD_BYTES = 64
"""Bytes of the head, which has the token; those of the owner begin behind it."""
_TOKEN_BYTES = 32
_PATH = re.compile(rf"(/proc/\d+/fd/\d+)#([0-9a-f]{{{2 * _TOKEN_BYTES}}})")


def create_memory(name: str, num_bytes: int | None = None) -> int:
    """A descriptor of new memory, which can only grow; with `num_bytes` it has so many behind its head for good."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.pwrite(fd, secrets.token_bytes(_TOKEN_BYTES), 0)
    os.ftruncate(fd, HEAD_BYTES + (num_bytes or 0))
    fixed = 0 if num_bytes is None else fcntl.F_SEAL_GROW
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL | fixed)
    return fd


def path_of(fd: int, pid: int, number: int) -> str:
    """What `open_memory` takes for the memory behind `fd`, which the process `pid` has as its descriptor `number`."""
    return f"/proc/{pid}/fd/{number}#{_token(fd)}"


def open_memory(path: str) -> int:
    """A descriptor of another process's memory. Raises `PeerGone` if it is gone; no other file is kept open or read."""
    if (found := _PATH.fullmatch(path)) is None:
        raise PeerGone(f"{path} does not name a shared-memory file")
    file, token = found.groups()
    try:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise PeerGone(f"no shared memory at {file}: {error}") from error
    if not _is_sealed(fd) or _token(fd) != token:
        os.close(fd)
        raise PeerGone(f"{file} is not the announced shared memory")
    return fd


@contextmanager
def file_in_memory(content: bytes) -> Iterator[str]:
    """The path of a file with this content, for a library that reads from files only; this process alone has it."""
    with os.fdopen(os.memfd_create("content"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _token(fd: int) -> str:
    return os.pread(fd, _TOKEN_BYTES, 0).hex()


def _is_sealed(fd: int) -> bool:
    """Whether this descriptor comes from `create_memory`, as far as the kernel can tell."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # a file of a disk has no seals
        return False
