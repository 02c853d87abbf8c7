"""`headrace status RUN` and `headrace ctl RUN ORDER`: look at a running job, and give it orders."""

import signal
import sys
from collections.abc import Sequence

from .command_line import CommandParser, exit_code

_ORDERS = """\
orders:
  status         print how far the run is, and its processes
  drain ROLLOUT  the rollout finishes its trajectories and leaves
  stop           as Ctrl-C: a checkpoint, then the end in order

An address needs the run's secret in HEADRACE_SECRET."""


def main(words: Sequence[str]) -> int:
    """Returns the exit code: 2 for a mistake, 1 if the run does not answer."""
    parser = CommandParser("ctl", "Gives a running job an order.")
    parser.epilog = _ORDERS
    parser.add_argument("run", metavar="RUN_FOLDER|HOST:PORT", help="the run")
    parser.add_argument("order", choices=("status", "drain", "stop"), help="the order")
    parser.add_argument("rollout", nargs="?", metavar="ROLLOUT", help="of drain, such as rollout-1")
    return exit_code(lambda: _order(parser, words))


def status(words: Sequence[str]) -> int:
    """Print the status of a running job; returns the exit code."""
    parser = CommandParser("status", "Prints how far a running job is, and its processes.")
    parser.add_argument("run", metavar="RUN_FOLDER|HOST:PORT", help="the run; an address needs HEADRACE_SECRET")
    return exit_code(lambda: _order(parser, words))


def _order(parser: CommandParser, words: Sequence[str]) -> int:
    given = parser.parse_args(words)
    order = getattr(given, "order", "status")
    rollout = getattr(given, "rollout", None) or ""
    if bool(rollout) != (order == "drain"):
        parser.error(f"{order} {'needs the name of a' if order == 'drain' else 'takes no'} rollout")
    from ..comm.messages import DrainRequested, Interrupted
    from .processes.control import talk

    match order:
        case "drain":
            return talk(given.run, DrainRequested(rollout))
        case "stop":
            return talk(given.run, Interrupted(signal.SIGTERM))
        case _:
            return talk(given.run, None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
