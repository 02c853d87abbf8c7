"""Signals: launcher and supervisors wait for theirs, and a role's process reports to the hub those that end the run."""

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from ...comm.environment import JOINING

if TYPE_CHECKING:
    from ...comm.mailbox import Mailbox
    from ...comm.messages import Message

WATCHED = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
"""The signals that a parent waits for: `wait_for_signal(seconds)` after `block_signals()`."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Those whose default ends a process."""
_SIGSET_BYTES = 128
_libc = ctypes.CDLL(None, use_errno=True)


def block_signals() -> None:
    """Block the signals of `WATCHED`: they stay pending until `wait_for_signal` takes them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    _route_to_main_thread()


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Block the signals of `WATCHED` for a while. Those that come meanwhile and are not waited for have no effect."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    handlers = _route_to_main_thread()
    try:
        yield
    finally:
        while wait_for_signal(0):
            pass
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _route_to_main_thread() -> dict[signal.Signals, Any]:
    """Pass the signals on that another thread of the process takes; returns the handlers of before.

    Only the calling thread has blocked them. A library's thread, such as one of OpenBLAS, could take one while the main thread does not
    wait: SIGTERM would end the process, SIGINT raise `KeyboardInterrupt` at any place, and an ignored one be lost.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}  # Python's handlers run in the main thread, which has not blocked them
    ident = threading.get_ident()
    # A handler that is not Python's could not be set again.
    numbers = [number for number in _ENDING if signal.getsignal(number) is not None]
    return {number: signal.signal(number, lambda n, _: signal.pthread_kill(ident, n)) for number in numbers}


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM, by which a scheduler ends a job, ends a command like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_for_signal(seconds: float) -> int:
    """The next signal of `WATCHED`; 0 if none comes within `seconds`, or if this process is stopped and continued meanwhile.

    This is the C library's `sigtimedwait`: Python's own returns a signal that never came after a stop beyond the deadline.
    """
    awaited = ctypes.create_string_buffer(_SIGSET_BYTES)
    for number in WATCHED:
        _libc.sigaddset(awaited, int(number))
    timespec = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))
    return max(0, int(_libc.sigtimedwait(awaited, None, timespec)))


class SignalReporter:
    """Reports the first SIGINT or SIGTERM to the hub, as soon as there is a mailbox for it; in the hub SIGUSR1 too.

    It ends the run; on a host that has joined a running job it drains this process.
    """

    def __init__(self, role: str) -> None:
        self.received = 0
        self.mailbox: Mailbox | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if role == "hub":
            signal.signal(signal.SIGUSR1, self._on_checkpoint_signal)

    def report_by(self, mailbox: "Mailbox") -> None:
        """Report through `mailbox` from now on; an earlier signal is reported at once."""
        self.mailbox = mailbox
        if self.received:
            self._report()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self.received:  # a scheduler sends SIGTERM to all processes of a job, and the supervisor sends it again
            self.received = number
            self._report()

    def _on_checkpoint_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.mailbox is not None:
            from ...comm.messages import CheckpointRequested

            self._send(CheckpointRequested())

    def _report(self) -> None:
        if self.mailbox is not None:
            from ...comm.messages import DrainRequested, Interrupted
            from ...comm.messages.base import process_of

            leaving = DrainRequested(process_of(self.mailbox.name))
            self._send(leaving if JOINING in os.environ else Interrupted(self.received))

    def _send(self, message: "Message") -> None:
        """Send in a thread: the handler interrupts the main thread, which may hold the mailbox's lock."""
        assert self.mailbox is not None
        threading.Thread(target=self.mailbox.send, args=("hub", message), name="signal report", daemon=True).start()
