"""Rows of a benchmark: measured, printed as a table, written as JSON."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One line: `value` in `unit` of `workload`, and its `ratio` to `peer` measured in the same run."""

    workload: str
    peer: str
    value: float
    unit: str
    ratio: float


Workload = Callable[[int], list[Row]]
"""Takes the bytes of a version, for what memory or loopback bounds; returns its rows."""


def best_seconds(
    *works: Callable[[], object], repeats: int = 10, now: Callable[[], float] = time.perf_counter
) -> list[float]:
    """The shortest timing of each of several works, taken in turns, so that whatever else the machine does meets all alike."""
    best = [float("inf")] * len(works)
    for _ in range(repeats):
        for index, work in enumerate(works):
            started = now()
            work()
            best[index] = min(best[index], now() - started)
    return best


HEADING = f"{'workload':<28} {'value':>10} {'unit':<6} {'ratio':>7}  to"


def line(row: Row) -> str:
    """A row for reading, under `HEADING`."""
    return f"{row.workload:<28} {row.value:>10.3f} {row.unit:<6} {row.ratio:>7.3f}  {row.peer}"


def write_json(rows: Sequence[Row], path: Path) -> None:
    """The rows for machines."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def read_json(path: Path) -> list[Row]:
    """What `write_json` wrote."""
    return [Row(**row) for row in json.loads(path.read_text())]


def parse(prog: str, argv: Sequence[str], workloads: Sequence[str]) -> argparse.Namespace:
    """The arguments that every benchmark takes."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    parser.add_argument("--only", nargs="+", metavar="WORKLOAD", default=[], help=", ".join(workloads))
    parser.add_argument("--no-heading", action="store_true", help="leave out the table's first line")
    parser.add_argument(
        "--megabytes", type=int, default=256, help="bytes of a version for what memory or loopback bounds"
    )
    return parser.parse_args(argv)


def run(workloads: Mapping[str, Workload], names: Sequence[str], num_bytes: int) -> list[Row]:
    """Run workloads by name and print their rows as they come; ends the process at a name that there is not."""
    rows: list[Row] = []
    if unknown := sorted(set(names) - set(workloads)):
        raise SystemExit(f"--only: no workload {', '.join(unknown)}; there are {', '.join(workloads)}")
    for name in names:
        for row in workloads[name](num_bytes):
            rows.append(row)
            sys.stdout.write(line(row) + "\n")
            sys.stdout.flush()
    return rows
