"""The parent of a serving process: it keeps the socket open, and starts the process again when it has crashed.

A client that connects meanwhile waits for the new process; it is not refused.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

from ..processes.child import Child, describe_exit, print_message
from ..processes.exits import ExitKind, classify_exit
from ..processes.signals import blocked_signals, wait_for_signal

END_S = 60.0
"""Longest time that the process has to end after a signal, before it is killed."""
_SOCKET_FD = "HEADRACE_SOCKET_FD"
"""Descriptor of the socket that the process answers on; its parent has it under the same number."""
_READY_FD = "HEADRACE_READY_FD"
"""Descriptor on which the process says that it answers."""
_POLL_S = 60.0


def serve_restarted(command: str, words: Sequence[str], opened: socket.socket) -> int:
    """Run `headrace COMMAND WORDS` as a child on a socket until it ends in order, or by a signal to this process; returns the exit code.

    A child that has answered and then crashes is started again; one that crashes again and again is not.
    """
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    descriptors = (opened.fileno(), writing)
    environment = {_SOCKET_FD: str(opened.fileno()), _READY_FD: str(writing)}
    line = [sys.executable, "-X", "faulthandler", "-m", "headrace", command, *words]
    restarts: list[float] = []
    has_answered = False
    try:
        with blocked_signals():
            while True:
                code, is_stopped = _wait(Child(command, line, environment=environment, pass_fds=descriptors))
                if is_stopped:
                    return 0
                has_answered = has_answered or _has_byte(reading)
                state = {"is_restartable": has_answered, "is_ending": False}
                kind = classify_exit(command, code, restarts, time.monotonic(), **state)
                if kind is not ExitKind.RESTART:
                    break
                restarts.append(time.monotonic())
                print_message(f"{describe_exit(command, code)} and is started again; scripts go on")
    finally:
        for descriptor in (reading, writing):
            os.close(descriptor)
    if kind is ExitKind.FAILED_UNREPORTED:
        print_message(f"{describe_exit(command, code)}{', again and again' if restarts else ''}")
    return code if code in (0, 2) else 1


def inherited_socket() -> socket.socket | None:
    """The socket of this process's parent; None in a process that has no such parent."""
    descriptor = os.environ.get(_SOCKET_FD)
    return None if descriptor is None else socket.socket(fileno=int(descriptor))


def tell_ready() -> None:
    """Tell the parent that this process answers, so that it is worth a new start."""
    if (descriptor := os.environ.get(_READY_FD)) is not None:
        os.write(int(descriptor), b".")


def _wait(child: Child) -> tuple[int, bool]:
    """The exit code of a child, and whether a signal to this process has ended it."""
    deadline = float("inf")
    while (code := child.poll()) is None:
        received = wait_for_signal(min(_POLL_S, max(0.0, deadline - time.monotonic())))
        if received in (signal.SIGINT, signal.SIGTERM):
            child.send(received if deadline == float("inf") else signal.SIGKILL)
            deadline = time.monotonic() + END_S
        if time.monotonic() >= deadline:
            child.send(signal.SIGKILL)
            deadline = time.monotonic() + END_S
    return code, deadline < float("inf")


def _has_byte(descriptor: int) -> bool:
    try:
        return bool(os.read(descriptor, 1 << 10))
    except BlockingIOError:
        return False
