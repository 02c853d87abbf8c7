"""The common parts of all benchmarks: options, measurements, timing, processes."""

import itertools
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from headrace.comm.environment import STREAMING_COPY_ENV
from headrace.comm.waits import waiting

_TESTS = str(Path(__file__).resolve().parents[1])
_PATHS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", _TESTS)]
ENVIRONMENT = {
    **STREAMING_COPY_ENV,
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONPATH": os.pathsep.join([_TESTS, *_PATHS]),
}
"""Environment of all processes of a benchmark: large copies as in a run, no warnings about hosts without a name, this package."""
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Options:
    """The sizes that a user can set; the help texts of the command say what they are."""

    megabytes: int = 256
    seconds: float = 60.0
    events: int = 1_000_000
    peer_python: str | None = None
    trl_python: str | None = None
    seeds: int = 5
    policy: str | None = None
    minutes: float = 30.0
    seed: int = 0
    hosts: int = 128
    members: int = 9
    kill: int = 100
    expiry_s: float = 10.0
    clients: int = 64
    tokens: int = 16


class Measurement(msgspec.Struct, frozen=True):
    """One figure: `value` in `unit`, and its `ratio` to `peer`. `runs` holds (value, ratio) of several runs; the figure is then
    their median."""

    name: str
    peer: str
    value: float
    unit: str
    ratio: float
    runs: tuple[tuple[float, float], ...] = ()
    holds: bool = True
    """False where the program broke a promise."""


Work = Callable[[str, Options], list[Measurement]]
"""Runs the workload of this name once."""


def write_measurements(rows: Sequence[Measurement], path: Path) -> None:
    """Write them as indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")


HEADING = f"{'workload':<24} {'value':>10} {'min..max':>16} {'unit':<8} {'ratio':>7} {'min..max':>14}  to"


def line(row: Measurement) -> str:
    """A row of the table under `HEADING`."""
    value_span, ratio_span = map(_span, zip(*row.runs, strict=True)) if len(row.runs) > 1 else ("", "")
    figures = f"{_short(row.value):>10} {value_span:>16} {row.unit:<8} {_short(row.ratio):>7} {ratio_span:>14}"
    return f"{row.name:<24} {figures}  {row.peer}" + ("" if row.holds else ": DOES NOT HOLD")


def _span(values: Sequence[float]) -> str:
    return f"{_short(min(values))}..{_short(max(values))}"


def _short(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"


def medians(runs: Sequence[Sequence[Measurement]]) -> list[Measurement]:
    """The medians of several runs of one workload, one measurement for each figure; a run may lack some of them."""
    figures: dict[tuple[str, str], list[Measurement]] = {}
    for row in itertools.chain.from_iterable(runs):
        figures.setdefault((row.name, row.peer), []).append(row)
    rows: list[Measurement] = []
    for same in figures.values():
        pairs = tuple(pair for row in same for pair in row.runs or ((row.value, row.ratio),))
        value, ratio = map(statistics.median, zip(*pairs, strict=True))
        holds = all(row.holds for row in same)
        rows.append(msgspec.structs.replace(same[0], value=value, ratio=ratio, runs=pairs, holds=holds))
    return rows


def best_seconds(
    *works: Callable[[], object], repeats: int = 10, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """The shortest time of each function. They take turns, so that other load on the machine affects all alike."""
    best = [float("inf")] * len(works)
    for _ in range(repeats):
        for index, work in enumerate(works):
            started = clock()
            work()
            best[index] = min(best[index], clock() - started)
    return best


def command(module: str, *words: object) -> list[str]:
    """The command that runs a module of this folder as a process."""
    return [sys.executable, "-m", f"bench.{module}", *map(str, words)]


def peer_environment(num_threads: int) -> dict[str, str]:
    """Of the peer's process: without this project's paths and allocator settings."""
    kept = {key: value for key, value in os.environ.items() if key not in ENVIRONMENT}
    return {**kept, "OMP_NUM_THREADS": str(num_threads)}


class BenchProcess:
    """A process that reports in lines. It ends by itself or when its standard input ends; `environment` replaces ours."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.name = " ".join(words)
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # `select` does not see bytes in a buffer
            env=environment or {**os.environ, **ENVIRONMENT},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            if kind is None:
                self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait(PATIENCE_S)
            self.process.stdout.close()

    def ask(self, start: str = "") -> str:
        """Send an empty line; returns the answer, see `line`."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        return self.line(start)

    def line(self, start: str = "", deadline_s: float = PATIENCE_S) -> str:
        """The next line of output that begins with `start`; raises RuntimeError if the process ends before it."""
        output = self.process.stdout
        assert output is not None
        with waiting(self.name, "a line", deadline_s) as wait:
            while True:
                wait.check()
                if select.select([output], [], [], wait.remaining_s)[0]:
                    text = output.readline()
                    if not text:
                        raise RuntimeError(f"{self.name} ended before its answer; its messages are above")
                    if text.startswith(start.encode()):
                        return text.decode().strip()
