"""Rows of a benchmark: measured, printed as a table, written as JSON."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
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


def best_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The shortest of several timings of `work`, after one that does not count."""
    work()
    timings = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        timings.append(time.perf_counter() - started)
    return min(timings)


def table(rows: Sequence[Row]) -> str:
    """The rows for reading."""
    lines = [f"{'workload':<28} {'value':>10} {'unit':<6} {'ratio':>7}  to"]
    return "\n".join(
        [*lines, *(f"{r.workload:<28} {r.value:>10.3f} {r.unit:<6} {r.ratio:>7.3f}  {r.peer}" for r in rows)]
    )


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
    parser.add_argument("--only", nargs="+", metavar="WORKLOAD", default=list(workloads), help=", ".join(workloads))
    parser.add_argument(
        "--megabytes", type=int, default=256, help="bytes of a version for what memory or loopback bounds"
    )
    return parser.parse_args(argv)


def report(rows: Sequence[Row], path: Path | None) -> None:
    """Print the table, and write JSON if asked to."""
    sys.stdout.write(table(rows) + "\n")
    if path is not None:
        write_json(rows, path)
