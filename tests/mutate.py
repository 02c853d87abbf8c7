"""Breaks the product on purpose, one mistake at a time, and counts the mistakes that the tests find.

    .venv/bin/python tests/mutate.py [--only TEXT] [--jobs N] [--tests TEST ...] [--list] [--output]

The mistakes are in `tests/mutations/*.toml` (`support/mutations.py` has their form). Each worker has a copy of the working tree, so
that processes that a test starts run the mutated source too. A run of tests is a fork of a process that has imported torch,
transformers and pytest, so it starts in a fraction of a second. First all tests that the mutations name run on the unbroken product;
then each mutation runs against its own tests, until one fails. A run that takes far longer than the unbroken one is stopped, and the
mutation is killed: its tests wait for something that never comes.

Survivors are printed. Exit code 1: fewer than 95 % were killed; 2: a test does not pass on the unbroken product.
"""

import argparse
import ctypes
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.mutations import MUTATIONS, Mutation, mutations

LEAST_KILLED = 0.95
SPARE_S, SLOWER = 20.0, 3.0
"""A mutated run may take `SLOWER` times as long as the unbroken one, and `SPARE_S` more."""
NOT_COPIED = (".git", ".venv", "runs", "build", "__pycache__", "*.egg-info", ".extras", ".*_cache", ".hypothesis")
IMPORTED = (
    "pytest", "hypothesis", "yaml", "msgspec", "numpy.testing", "torch", "torch.distributed", "torch.distributed.fsdp",
    "torch.distributed.checkpoint", "torch.nn.attention.flex_attention", "transformers", "transformers.modeling_utils",
    "transformers.models.qwen3.modeling_qwen3", "safetensors.torch", "xxhash",
)  # fmt: skip
"""Modules that nearly every test imports and no mutation changes. A module that another mutation could change is not among them."""


@dataclass(frozen=True)
class Outcome:
    """The result of one run: the test that failed, "" if none did, and the seconds of each test that passed."""

    failed: str
    passed: dict[str, float]
    output: str


class Recorder:
    """A plugin of pytest: writes down what passed, and ends the process at the first failure, without any teardown."""

    def __init__(self, record: Path) -> None:
        self._record = record
        self._passed: dict[str, float] = {}

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.end(report.nodeid or "collection")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            print(report.longreprtext, flush=True)
            self.end(report.nodeid)
        if report.passed and (report.when == "call" or report.nodeid in self._passed):
            self._passed[report.nodeid] = self._passed.get(report.nodeid, 0.0) + report.duration

    def end(self, failed: str) -> NoReturn:
        """Leave the record and end this process."""
        self._record.write_text(json.dumps([failed, self._passed]))
        os._exit(0)


class Tree:
    """A copy of the working tree; Python imports `headrace` from its `package` folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "tree"
        self.package = self.root / "src"
        self._num_broken = self._num_runs = 0

    def fill(self) -> None:
        """Copy the source; the checkout may be one without git."""
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))

    @contextmanager
    def broken(self, mutation: Mutation) -> Iterator[None]:
        """The tree with one mutation. The time of the file differs each time, or Python would take its compiled form for current."""
        path = self.root / mutation.file
        text, time_ns = path.read_text(), path.stat().st_mtime_ns
        self._num_broken += 1
        path.write_text(mutation.applied(text))
        os.utime(path, ns=(time_ns, time_ns + self._num_broken * 10**9))
        try:
            yield
        finally:
            path.write_text(text)
            os.utime(path, ns=(time_ns, time_ns))

    def run(self, tests: Iterable[str], deadline_s: float = 3600.0) -> Outcome:
        """Run tests in a fork of this process; everything that they started has ended when this returns."""
        self._num_runs += 1
        files = self.folder / f"run-{self._num_runs}"
        files.mkdir()
        child = os.fork()
        if not child:
            self._run_here(sorted(set(tests)), files)
        failed = _wait(child, deadline_s)
        _kill_children()
        record, output = files / "record.json", (files / "output").read_text(errors="replace")
        passed: dict[str, float] = {}
        if not failed:
            failed, passed = json.loads(record.read_text()) if record.exists() else ("a test ended the process", {})
        _unmount_below(files)
        shutil.rmtree(files, ignore_errors=True)
        return Outcome(failed, passed, output)

    def _run_here(self, tests: list[str], files: Path) -> NoReturn:
        """Run tests in this process and end it. `files` is a folder for the record, the output and what the tests write."""
        os.setsid()
        with (files / "output").open("w") as file:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(self.root)
        os.environ |= {"PYTHONPATH": str(self.package), "TMPDIR": str(files)}
        tempfile.tempdir = None
        sys.path[:] = [str(self.package), *(path for path in sys.path if path != str(ROOT / "tests"))]
        for name in [name for name in sys.modules if name.partition(".")[0] == "support"]:
            del sys.modules[name]
        recorder, failed = Recorder(files / "record.json"), "pytest could not start"
        try:
            import pytest

            options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
            code = pytest.main(
                [*options, "--hypothesis-seed=0", "--basetemp", str(files / "tests"), *tests], plugins=[recorder]
            )
            failed = "" if code == pytest.ExitCode.OK else f"pytest ended with {code!r}"
            comm = importlib.import_module("headrace.comm")
            assert Path(str(comm.__file__)).is_relative_to(self.root), f"{comm.__file__} is not in the copy"
        except BaseException:  # noqa: BLE001 - the record says that this run failed
            traceback.print_exc()
        sys.stdout.flush()
        recorder.end(failed)


def _wait(child: int, deadline_s: float) -> str:
    """Wait for a child, and kill it after the deadline; returns why it is killed, "" if it is not."""
    deadline = time.monotonic() + deadline_s
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"nothing after {deadline_s:.0f} s"
        time.sleep(0.01)
    return ""


def _kill_children() -> None:
    """Kill what a run of tests has left; orphans are children of this process."""
    while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for pid in map(int, children):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _unmount_below(folder: Path) -> None:
    """Undo what a test has mounted that ended before its teardown."""
    places = [Path(line.split()[1]) for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in reversed([place for place in places if folder in place.parents]):
        subprocess.run(["umount", "--lazy", str(place)], check=False)


def _adopt_orphans() -> None:
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def _seconds(tests: Iterable[str], passed: dict[str, float]) -> dict[str, float]:
    """How long each named test or file of tests took on the unbroken product; 0 for one of which nothing passed."""
    return {
        name: sum(s for test, s in passed.items() if test == name or test.startswith((f"{name}::", f"{name}[")))
        for name in tests
    }


def _work(folder: Path, mine: Sequence[Mutation], seconds: dict[str, float], pipe: int) -> NoReturn:
    """A worker: runs its mutations and writes a line for each: its name, the test that killed it, and what was printed."""
    _adopt_orphans()
    with os.fdopen(pipe, "w") as out:
        tree = Tree(folder)
        for mutation in mine:
            with tree.broken(mutation):
                outcome = tree.run(mutation.tests, SPARE_S + SLOWER * sum(seconds[test] for test in mutation.tests))
            print(json.dumps([mutation.name, outcome.failed, outcome.output]), file=out, flush=True)
    os._exit(0)


def _run_all(chosen: Sequence[Mutation], num_jobs: int, folder: Path, *, shows_output: bool) -> dict[str, str] | None:
    """Which test killed each mutation, by its name, "" for a survivor. None if a test does not pass on the unbroken product."""
    first = Tree(folder / "0")
    first.fill()
    named = {test for mutation in chosen for test in mutation.tests}
    unbroken = first.run(named)
    seconds = _seconds(named, unbroken.passed)
    not_run = [test for test, took in seconds.items() if not took]
    if unbroken.failed or not_run:
        print(unbroken.output)
        print(f"on the unbroken product: {unbroken.failed or f'nothing passed of {not_run}'}")
        return None
    print(f"{len(unbroken.passed)} tests pass on the unbroken product", flush=True)
    read, write = os.pipe()
    workers: list[int] = []
    for number in range(num_jobs):
        if number:
            shutil.copytree(first.folder, folder / str(number), symlinks=True)
    for number in range(num_jobs):
        worker = os.fork()
        if not worker:
            os.close(read)
            _work(folder / str(number), chosen[number::num_jobs], seconds, write)
        workers.append(worker)
    os.close(write)
    killers: dict[str, str] = {}
    with os.fdopen(read) as lines:
        for line in lines:
            name, killer, output = json.loads(line)
            killers[name] = killer
            if shows_output:
                print(output)
            print(f"{f'killed by {killer}' if killer else 'SURVIVED'}: {name}", flush=True)
    for worker in workers:
        os.waitpid(worker, 0)
    return killers


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="mutations with this text in their name or file")
    parser.add_argument("--jobs", type=int, default=1, help="mutations that run at one time")
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    parser.add_argument("--output", action="store_true", help="print what the tests of each mutation print")
    parser.add_argument("--tests", nargs="+", help="run these for each mutation, in place of its own")
    parser.add_argument("--mutations", type=Path, default=MUTATIONS, help="folder of the lists")
    asked = parser.parse_args()
    chosen = [each for each in mutations(asked.mutations) if asked.only in each.name or asked.only in each.file]
    if asked.tests:
        chosen = [replace(each, tests=tuple(asked.tests)) for each in chosen]
    if asked.list or not chosen:
        print("\n".join(f"{each.file}: {each.name}" for each in chosen) or f"no mutation has {asked.only!r} in it")
        return 0 if chosen else 2
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    _adopt_orphans()
    started = time.monotonic()
    for name in IMPORTED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="headrace-mutate-") as folder:
        killers = _run_all(
            chosen, max(1, min(asked.jobs, len(chosen))), Path(folder).resolve(), shows_output=asked.output
        )
    if killers is None:
        return 2
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(each.ru_utime + each.ru_stime for each in used)
    survivors = [each for each in chosen if not killers.get(each.name)]
    share = 1 - len(survivors) / len(chosen)
    print(
        f"\n{len(chosen) - len(survivors)} of {len(chosen)} mutations killed ({share:.1%}), "
        f"{cpu_s:.0f} s of CPU, {time.monotonic() - started:.0f} s"
    )
    for each in survivors:
        print(f"survived: {each.name} ({each.file})")
    return 0 if share >= LEAST_KILLED else 1


if __name__ == "__main__":
    sys.exit(main())
