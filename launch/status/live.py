"""The terminal of `headrace run`: the lines of all processes, and the status of the run below them.

The processes write to a pipe in place of the terminal. A thread of the launcher prints their lines and draws the picture; a second one
asks the hub for the report, since that may take long. Where the output is no terminal nothing of this happens.
"""

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import F_SETPIPE_SZ, fcntl
from pathlib import Path

from ...comm.clock import elapsed_s
from ...comm.errors import HeadraceError
from ...comm.messages import StatusReport
from ...comm.waits import join_thread
from ..config.run_folder import SUMMARY_FILE
from .picture import MOST_MEMBERS, Line, lines, paint, starting, unanswered
from .query import HubQuery, try_to_open
from .screen import Screen, is_foreground, is_live

_log = logging.getLogger(__name__)

REFRESH_S = 1.0
"""Seconds between two pictures, and between two questions to the hub."""
_LATE_S = 3.0
"""Seconds without an answer after which the picture says so."""
_CONNECT_S = 2.0
_PIPE_BYTES = 1 << 20
"""Of lines that wait for a launcher that is stopped, before the processes wait for it."""
_READ_BYTES = 1 << 16
"""Of one read; also the most bytes of a line without an end that are kept."""
_JOIN_S = 5.0


class Reports:
    """A thread that asks the hub of a run for its status again and again, from `start` to `close`."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._is_over = threading.Event()
        self._latest: tuple[StatusReport, float] | None = None
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def close(self) -> None:
        """Stop; a question under way is given up."""
        self._is_over.set()
        join_thread(self._thread, _JOIN_S)

    def picture(self, size: os.terminal_size) -> list[str]:
        """What to draw on a terminal of this size."""
        width = size.columns - 1
        if self._latest is None:
            return paint(starting(elapsed_s()), width)
        report, moment = self._latest
        shown = [*lines(report, max(2, min(MOST_MEMBERS, size.lines - 10)))]
        if (Path(self._run_dir) / SUMMARY_FILE).exists():
            shown.append(Line("the run has ended; its processes are leaving", "dim"))
        elif (late_s := time.monotonic() - moment) > _LATE_S:
            shown.append(unanswered(late_s))
        return paint([Line("─" * min(width, 60), "dim"), *shown][: max(1, size.lines - 1)], width)

    def _run(self) -> None:
        query: HubQuery | None = None
        while not self._is_over.wait(REFRESH_S):
            try:
                query = query or try_to_open(self._run_dir, _CONNECT_S)
                if query is not None and (report := query.ask(REFRESH_S)) is not None:
                    self._latest = (report, time.monotonic())
            except HeadraceError:  # the store has ended, and a run that is started again has another one
                self._close(query)
                query = None
        self._close(query)

    @staticmethod
    def _close(query: HubQuery | None) -> None:
        if query is not None:
            with suppress(HeadraceError):
                query.close()


class LiveTerminal:
    """Takes the output of this process and its children, and prints it above the picture; from `start` to `close`.

    stdout, and stderr if it is a terminal too, are a pipe from the construction on, which children inherit. The thread begins with `start`,
    after the children have been made.
    """

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        self._terminal = os.dup(sys.stdout.fileno())
        self._screen = Screen(self._terminal)
        self._kept = {number: os.dup(number) for number in (1, 2) if number == 1 or os.isatty(number)}
        """What stdout and stderr were."""
        self._pipe, write = os.pipe()
        os.set_blocking(self._pipe, False)
        with suppress(OSError):  # the user's pipes have that many bytes already
            fcntl(write, F_SETPIPE_SZ, _PIPE_BYTES)
        self._wake, self._waker = os.pipe()
        _flush()
        for number in self._kept:
            os.dup2(write, number)
        os.close(write)
        self._partial = b""
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)
        self._signals, self._signalled = os.pipe()
        for number in (self._signals, self._signalled):
            os.set_blocking(number, False)
        self._continued = signal.getsignal(signal.SIGCONT)
        self._woken = -1

    def start(self) -> None:
        """Begin to print and to draw."""
        # Python's handler would run when the main thread is back from its wait, which may be much later.
        self._woken = signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)
        signal.signal(signal.SIGCONT, lambda number, frame: None)
        self._reports.start()
        self._thread.start()

    def close(self) -> None:
        """Print what is left, remove the picture, and give stdout and stderr back."""
        _flush()
        for number, before in self._kept.items():
            os.dup2(before, number)
            os.close(before)
        os.close(self._waker)
        if self._thread.ident is None:
            self._read_all()
        else:
            signal.signal(signal.SIGCONT, self._continued or signal.SIG_DFL)
            signal.set_wakeup_fd(self._woken)
            join_thread(self._thread, _JOIN_S)
            self._reports.close()
        if self._thread.is_alive():
            return  # a terminal that is stopped (Ctrl-S): the thread may write to these, which would be other files by then
        for descriptor in (self._pipe, self._wake, self._signals, self._signalled, self._terminal):
            os.close(descriptor)

    def _run(self) -> None:
        """Until `close`. A picture that cannot be drawn is left out: the run's lines count more."""
        drawn_at = 0.0
        picture: list[str] = []
        is_over = False
        while not is_over:
            left_s = max(0.0, drawn_at + REFRESH_S - time.monotonic())
            readable, _, _ = select.select([self._pipe, self._wake, self._signals], [], [], left_s)
            if self._signals in readable and signal.SIGCONT in os.read(self._signals, _READ_BYTES):
                self._screen.forget()
            is_over = self._wake in readable
            if is_over:
                break
            above = self._read() if self._pipe in readable else b""
            if not is_foreground(self._terminal):
                drawn_at = time.monotonic()  # looks again after a moment
                self._screen.forget()
                picture = []
            elif time.monotonic() - drawn_at >= REFRESH_S or not picture:
                drawn_at = time.monotonic()
                picture = self._picture()
            elif not above:
                continue
            with suppress(OSError):  # a terminal that is gone; the processes must not wait for it
                self._screen.draw(picture, above)
        self._read_all()

    def _picture(self) -> list[str]:
        """What to draw; after an error nothing, since the lines of the run count more."""
        if self._is_broken:
            return []
        try:
            return self._reports.picture(self._screen.size)
        except Exception:  # noqa: BLE001 - as the docstring says
            self._is_broken = True
            _log.exception("the status cannot be drawn any more")
            return []

    def _read_all(self) -> None:
        """Print the rest, down to a line without an end, and leave no picture."""
        rest = b""
        while piece := self._read():
            rest += piece
        with suppress(OSError):
            self._screen.draw([], rest + (self._partial and self._partial + b"\n"))
        self._partial = b""

    def _read(self) -> bytes:
        """The whole lines that have come; the beginning of one is kept, unless it is too long, such as that of a progress bar."""
        data = b""
        with suppress(BlockingIOError):
            data = os.read(self._pipe, _READ_BYTES)
        whole, end, partial = (self._partial + data).rpartition(b"\n")
        if len(partial) >= _READ_BYTES:
            whole, end, partial = self._partial + data, b"\n", b""
        self._partial = partial
        return whole + end


@contextmanager
def live_terminal(run_dir: Path, *, is_first: bool) -> Iterator[LiveTerminal | None]:
    """The terminal of a launcher while its torchrun runs: None where the lines stay plain. is_first: this is the run's first host."""
    if not is_first or sys.stdout is not sys.__stdout__ or not is_live(sys.stdout, os.environ):
        yield None
        return
    terminal = LiveTerminal(Reports(str(run_dir)))
    try:
        yield terminal
    finally:
        terminal.close()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
