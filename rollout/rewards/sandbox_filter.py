"""The filter of system calls (seccomp) around a program in the sandbox: what would pass its bounds is refused with EPERM.

Memory that no limit of a process counts (memfd, System V segments, a file system of its own) and sockets by a path: a network namespace does
not hold those, and a host's daemons listen on them. A filter stays for good, in all processes of the program.
"""

import ctypes
import os
import platform
import struct
from typing import NamedTuple

_LOAD = 0x20
_AND = 0x54
_EQUAL = 0x15
_AT_LEAST = 0x35
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050001
_KILL = 0x80000000
_NUMBER = 0
_ARCHITECTURE = 4
_FIRST = 16
_SECOND = 24
"""Where the filter finds the number of a call, its architecture, and the lower halves of its arguments."""
_AF_UNIX = 1
_SOCK_STREAM = 1
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_MODE_FILTER = 2


class _Calls(NamedTuple):
    architecture: int
    socket: int
    socketpair: int
    refused: tuple[int, ...]
    """memfd_create, shmget, unshare, mount."""


_ON_EVERY_MACHINE = (425, 430, 447)
"""io_uring_setup, which makes calls past the filter, fsopen, memfd_secret."""
_FOREIGN = 0x40000000
"""The first number of x32, a second set of numbers of x86-64."""
_MACHINES = {
    "x86_64": _Calls(0xC000003E, 41, 53, (319, 29, 272, 165)),
    "aarch64": _Calls(0xC00000B7, 198, 199, (279, 194, 97, 40)),
}
_libc = ctypes.CDLL(None, use_errno=True)


def filter_program() -> bytes:
    """The filter's instructions. Raises `OSError` for a machine whose system calls it does not know."""
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise OSError(f"no filter of system calls for {platform.machine()}")
    return b"".join(struct.pack("HBBI", *rule) for rule in _rules(machine))


def filter_calls() -> None:
    """Refuse these calls from now on, and give up new privileges. Raises `OSError` where the host cannot."""
    instructions = filter_program()
    code = ctypes.create_string_buffer(instructions)
    program = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(code))
    privileges_kept = _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if privileges_kept or _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.c_char_p(program), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def _rules(calls: _Calls) -> list[tuple[int, int, int, int]]:
    """Instructions of classic BPF: operation, how many to skip if it holds and if not, operand."""
    rules = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, calls.architecture), (_RETURN, 0, 0, _KILL)]
    rules += [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _FOREIGN), (_RETURN, 0, 0, _REFUSE)]
    for number in (*calls.refused, *_ON_EVERY_MACHINE):
        rules += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    # A pair of streams, which `asyncio` needs, is connected for good; one of datagrams could still send to a path.
    rules += [(_EQUAL, 0, 4, calls.socketpair), (_LOAD, 0, 0, _SECOND), (_AND, 0, 0, 0xF)]
    rules += [(_EQUAL, 4, 0, _SOCK_STREAM), (_RETURN, 0, 0, _REFUSE)]
    rules += [(_EQUAL, 0, 2, calls.socket), (_LOAD, 0, 0, _FIRST), (_EQUAL, 1, 0, _AF_UNIX)]
    return [*rules, (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
