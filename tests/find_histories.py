"""Finds, for each mistake of mutations/simulation.toml, a history with few faults that shows it.

    .venv/bin/python tests/find_histories.py [--only TEXT] [--last SEED] [--steps N] [--jobs N] [--again]

Each mistake is made in a copy of the tree, where `simulate.py` tries the seeds until one breaks. Its history, with as few faults as it
needs, is written to `tests/assets/histories/NAME.json`, where NAME is that of the mutation's test. `--again` finds those that are there too.
Exit code 1 if a mistake was not found.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from mutate import Tree
from simulation.histories import HISTORIES, History
from support.mutations import Mutation, mutations

_FILE = "tests/simulation/test_simulation.py"


def main(words: list[str]) -> int:
    """Find the histories; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="mutations whose names have this text")
    parser.add_argument("--last", type=int, default=400, metavar="SEED", help="the seed after the last one")
    parser.add_argument("--steps", type=int, default=30, help="of each history")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--again", action="store_true", help="find those that are there too")
    options = parser.parse_args(words)
    missing = 0
    with tempfile.TemporaryDirectory(prefix="headrace-histories-") as folder:
        tree = Tree(Path(folder))
        tree.fill()
        for mutation in mutations():
            test = next((test for test in mutation.tests if test.startswith(_FILE) and "[" in test), "")
            path = HISTORIES / f"{test.partition('[')[2].rstrip(']')}.json"
            if test and options.only in mutation.name and (options.again or not path.exists()):
                missing += not _find(tree, mutation, path, options)
    return min(missing, 1)


def _find(tree: Tree, mutation: Mutation, path: Path, options: argparse.Namespace) -> bool:
    """Write the first history that breaks; False if none does."""
    started = time.monotonic()
    command = [sys.executable, "tests/simulate.py", "0", str(options.last), "--steps", str(options.steps)]
    command += ["--jobs", str(options.jobs), "--most", "1"]
    environment = {**os.environ, "PYTHONPATH": str(tree.package), "PYTHONDONTWRITEBYTECODE": "1"}
    with tree.broken(mutation):
        done = subprocess.run(command, cwd=tree.root, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    number = next((number for number, line in enumerate(lines) if line.startswith("seed ")), None)
    seconds = time.monotonic() - started
    if number is None:
        print(f"not found in {options.last} seeds, {seconds:.0f} s: {mutation.name}\n{done.stderr[-500:]}", flush=True)
        return False
    found = next(line for line in lines[number:] if line.startswith("    {"))  # a message may have several lines
    history = msgspec.json.decode(found, type=History)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(history), indent=1) + b"\n")
    faults = ", ".join(f"{fault.kind} {fault.role}" for fault in history.plan)
    print(f"found in {seconds:.0f} s, {len(history.plan)} faults ({faults}): {mutation.name}", flush=True)
    print(f"    {lines[number][:200]}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
