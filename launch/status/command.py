"""`headrace status RUN` and `headrace ctl RUN ORDER`: look at a run, and give it orders."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...comm.errors import StoreGone
from ..command_line import CommandParser, exit_code

if TYPE_CHECKING:
    from ...comm.messages import StatusReport

_ORDERS = """\
orders:
  status         as headrace status
  drain ROLLOUT  the rollout finishes its trajectories and leaves
  stop           as Ctrl-C: a checkpoint, then the end in order

An address needs the run's secret in HEADRACE_SECRET."""
_WATCH_S = 1.0
"""Seconds between two pictures on a terminal."""
_PLAIN_S = 10.0
"""Seconds between two of them elsewhere."""
_TELL_S = 2.0
"""Seconds without an answer of the hub after which the command says that it waits."""


def main(words: Sequence[str]) -> int:
    """Returns the exit code: 2 for a mistake, 1 if the run does not answer."""
    parser = CommandParser("ctl", "Gives a running job an order.")
    parser.epilog = _ORDERS
    parser.add_argument("run", metavar="RUN_FOLDER|HOST:PORT", help="the run")
    parser.add_argument("order", choices=("status", "drain", "stop"), help="the order")
    parser.add_argument("rollout", nargs="?", metavar="ROLLOUT", help="of drain, such as rollout-1")
    return exit_code(lambda: _order(parser, words))


def status(words: Sequence[str]) -> int:
    """Print how far a run is, what its processes do, and who waits for whom; returns the exit code."""
    parser = CommandParser("status", "Prints how far a run is, what its processes do, and who waits for whom.")
    parser.add_argument("run", metavar="RUN_FOLDER|HOST:PORT", help="the run; an address needs HEADRACE_SECRET")
    parser.add_argument("--watch", action="store_true", help="go on until the run ends, or until Ctrl-C")
    return exit_code(lambda: _status(parser, words))


def _status(parser: CommandParser, words: Sequence[str]) -> int:
    given = parser.parse_args(words)
    return _watch(given.run) if given.watch else _print_status(given.run)


def _order(parser: CommandParser, words: Sequence[str]) -> int:
    given = parser.parse_args(words)
    rollout = given.rollout or ""
    if bool(rollout) != (given.order == "drain"):
        parser.error(f"{given.order} {'needs the name of a' if given.order == 'drain' else 'takes no'} rollout")
    if given.order == "status":
        return _print_status(given.run)
    from ...comm.messages import DrainRequested, Interrupted
    from .query import order

    return order(given.run, DrainRequested(rollout) if rollout else Interrupted(signal.SIGTERM))


def _print_status(where: str) -> int:
    """Print the status once. Raises `SettingError`, and `StoreGone` if no run answers."""
    from ..processes.child import print_message
    from .picture import describe
    from .query import ANSWER_S, ended, open_query

    if text := ended(where):
        sys.stdout.write(f"{text}\n")
        return 0
    query = open_query(where)
    try:
        report = query.ask(_TELL_S)
        if report is None:
            print_message(f"the hub does not answer; it may be being started again. Waiting for up to {ANSWER_S:g} s")
            report = query.ask(ANSWER_S - _TELL_S)
    finally:
        query.close()
    if report is None:
        print_message(f"error: the hub has not answered within {ANSWER_S:g} s")
        return 1
    sys.stdout.write("".join(f"{line}\n" for line in describe(report)))
    return 0


def _watch(where: str) -> int:
    """Print the status again and again until the run ends; on a terminal in one place. Returns the exit code.

    Raises `SettingError`, and `StoreGone` if the run has ended without saying how.
    """
    from ..processes.child import print_message
    from .query import ended, is_starting, open_query

    show = _painter()
    is_told = False
    query = None
    asked_at = time.monotonic()
    try:
        while not (text := ended(where)):
            try:
                query = query or open_query(where)
                report = query.ask(_WATCH_S)
            except StoreGone:
                query = None  # if the run is started again, it has another store
                if not (text := ended(where)) and not is_starting(where):
                    raise
                if not text and not is_told:
                    print_message("the run is starting")
                is_told = True
                time.sleep(_WATCH_S)
                continue
            asked_at = time.monotonic() if report is not None else asked_at
            show(report, time.monotonic() - asked_at)
    finally:
        if query is not None:
            query.close()
    show(None, 0.0)
    sys.stdout.write(f"{text}\n")
    return 0


def _painter() -> Callable[["StatusReport | None", float], None]:
    """Shows a report, or None and the seconds without an answer; with 0 seconds nothing is left. It waits a moment then."""
    from .picture import Line, describe, lines, paint, unanswered
    from .screen import Screen, is_live

    if not is_live(sys.stdout, os.environ):

        def tell(report: "StatusReport | None", late_s: float) -> None:
            if report is not None:
                sys.stdout.write("".join(f"{line}\n" for line in (*describe(report), "")))
                sys.stdout.flush()
                time.sleep(_PLAIN_S)

        return tell
    screen = Screen(sys.stdout.fileno())
    shown: list[Line] = []

    def draw(report: "StatusReport | None", late_s: float) -> None:
        if report is None and not late_s:
            screen.draw([])
            return
        shown[:] = shown if report is None else lines(report)
        late = [unanswered(late_s)] if late_s > _TELL_S else []
        size = screen.size
        screen.draw(paint([*shown, *late][: size.lines - 1], size.columns - 1))
        time.sleep(_WATCH_S if report is not None else 0.0)

    return draw


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
