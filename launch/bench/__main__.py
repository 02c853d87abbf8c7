"""The benchmark of the experience queue: storage units, load, the hub with its journal.

    python -m headrace.launch.bench [--peer-python PATH] [--seconds N] [--only WORKLOAD ...] [--json FILE]

`units` needs an interpreter with TransferQueue (`--peer-python`, e.g. of a virtual environment into which
`pip install TransferQueue` went); without one it is left out.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from .harness import HEADING, Row, line, write_json
from .hub import hub_events, journal_replay
from .storage import beside_peer
from .storage_load import load


def main(argv: list[str]) -> None:
    """Run the workloads asked for, print the table."""
    parser = argparse.ArgumentParser(prog="python -m headrace.launch.bench")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    parser.add_argument("--peer-python", metavar="PATH", help="interpreter that has TransferQueue")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long `load` lasts")
    parser.add_argument("--events", type=int, default=1_000_000, help="events of the journal that is replayed")
    parser.add_argument("--only", nargs="+", default=[], choices=["units", "load", "hub-events", "journal-replay"])
    arguments = parser.parse_args(argv)
    workloads: dict[str, Callable[[], list[Row]]] = {
        "units": lambda: beside_peer(arguments.peer_python),
        "load": lambda: load(arguments.seconds),
        "hub-events": hub_events,
        "journal-replay": lambda: journal_replay(arguments.events),
    }
    names = arguments.only or list(workloads)
    if "units" in names and arguments.peer_python is None:
        print("units: left out, for --peer-python names no interpreter that has TransferQueue")
        names.remove("units")
    print(HEADING, flush=True)
    rows: list[Row] = []
    for name in names:
        for row in workloads[name]():
            rows.append(row)
            print(line(row), flush=True)
    if arguments.json is not None:
        write_json(rows, arguments.json)


if __name__ == "__main__":
    main(sys.argv[1:])
