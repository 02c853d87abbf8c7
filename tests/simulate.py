"""Simulated histories from seeds: whole runs in virtual time under faults, each checked after each event.

    .venv/bin/python tests/simulate.py FIRST LAST [--steps N] [--faults N] [--jobs N] [--most N]

Prints each history that breaks a promise with as few faults as it needs, and counts the faults. A seed gives the same history in each
process, bit for bit. Exit code 1 if any breaks.
"""

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from simulation.histories import History, SeededChooser, history, problem, run, shrunk

_PART = 50
"""Histories of one process: it takes as long to start as two of them."""


class Part(NamedTuple):
    """The result of one process."""

    num: int
    cpu_s: float
    happened: Counter[str]
    widest: float
    """Of all windows, in steps."""
    broken: list[tuple[int, str, History]]


def main(words: list[str]) -> int:
    """Run the histories of the seeds; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, help="the seed after the last one")
    parser.add_argument("--steps", type=int, default=100, help="of each history")
    parser.add_argument("--faults", type=int, default=6, help="of each history")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--most", type=int, default=5, help="broken histories after which it ends")
    options = parser.parse_args(words)
    started, num, cpu_s, happened, num_broken, widest = time.monotonic(), 0, 0.0, Counter[str](), 0, 0.0
    for part in _parts(options):
        num, cpu_s, happened = num + part.num, cpu_s + part.cpu_s, happened + part.happened
        widest = max(widest, part.widest)
        for seed, what, least in part.broken:
            num_broken += 1
            print(f"seed {seed}: {what}\n    {msgspec.json.encode(least).decode()}", flush=True)
        if num_broken >= options.most:
            break
    seconds = time.monotonic() - started
    print(f"{num:,} histories of {options.steps} steps and {options.faults} faults, {num_broken} broken")
    print(
        f"{cpu_s / max(num, 1):.2f} s of CPU for each, {3600 * num / seconds:,.0f} an hour with {options.jobs} processes"
    )
    print(f"the widest window was {widest:.1f} steps")
    for name, count in sorted(happened.items()):
        print(f"{count:9,} {name}")
    return min(num_broken, 1)


def _parts(options: argparse.Namespace) -> Iterator[Part]:
    """Parts of the seeds as they are done; a new process for each, since a history leaves descriptors and threads of dead processes."""
    seeds = range(options.first, options.last)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context, max_tasks_per_child=1) as pool:
        parts = [
            pool.submit(_run, seeds[i : i + _PART], options.steps, options.faults) for i in range(0, len(seeds), _PART)
        ]
        try:
            for part in as_completed(parts):
                yield part.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _run(seeds: range, steps: int, num_faults: int) -> Part:
    logging.disable(logging.WARNING)
    worked, happened, broken, widest = time.process_time(), Counter[str](), list[tuple[int, str, History]](), 0.0
    run(history(SeededChooser(0), 5, 0))
    gc.freeze()  # what is imported now need not be looked at again each time that a process of a history ends
    for seed in seeds:
        drawn = history(SeededChooser(seed), steps, num_faults)
        try:
            done = run(drawn)
            happened, widest = happened + done.applied, max(widest, done.checks.widest)
        except Exception as error:  # noqa: BLE001 - any error is a broken promise
            broken.append((seed, *_reduced(drawn, f"{type(error).__name__}: {error}")))
    return Part(len(seeds), time.process_time() - worked, happened, widest, broken)


def _reduced(drawn: History, what: str) -> tuple[str, History]:
    """The error of a broken history, and the history with as few faults as are needed; the drawn one if it holds the second time."""
    if not problem(drawn):
        return f"{what} (the same history held the second time)", drawn
    least = shrunk(drawn)
    again = problem(least) or "it held the second time"
    return what if again == what else f"{what}\n    with fewer faults: {again}", least


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of text follows it
        os.execve(
            sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        )
    sys.exit(main(sys.argv[1:]))
