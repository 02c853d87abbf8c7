"""Simulated histories from seeds: whole runs in virtual time under faults, each checked after each event.

    .venv/bin/python tests/simulate.py FIRST LAST [--steps N] [--faults N] [--most N]

Prints the histories that break a promise, each with as few faults as it needs, and the counts of the faults. Exit code 1 if any breaks.
"""

import argparse
import logging
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.histories import SeededChooser, history, problem, run, shrunk


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, help="the seed after the last one")
    parser.add_argument("--steps", type=int, default=100, help="of each history")
    parser.add_argument("--faults", type=int, default=6, help="of each history")
    parser.add_argument("--most", type=int, default=5, help="broken histories after which it ends")
    options = parser.parse_args(words)
    logging.disable(logging.WARNING)
    happened, num_broken, num_done = Counter[str](), 0, 0
    started, worked = time.monotonic(), time.process_time()
    for seed in range(options.first, options.last):
        drawn = history(SeededChooser(seed), options.steps, options.faults)
        num_done += 1
        try:
            happened += run(drawn).applied
        except Exception:  # noqa: BLE001 - any error is a broken promise
            num_broken += 1
            least = shrunk(drawn)
            print(f"seed {seed}: {problem(least)}\n{msgspec.json.encode(least).decode()}", flush=True)
            if num_broken == options.most:
                break
    wall_s, cpu_s = time.monotonic() - started, time.process_time() - worked
    print(
        f"{num_done} histories of {options.steps} steps, {num_broken} broken; {cpu_s / num_done:.2f} s of CPU and {wall_s / num_done:.2f} s each"
    )
    for name, count in sorted(happened.items()):
        print(f"{count:7} {name}")
    return min(num_broken, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
