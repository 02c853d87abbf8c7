"""The program. Without torchrun's environment it is the launcher: it checks the recipe, starts torchrun, tells how the
run ended. Under torchrun it is a seat.

    python -m headrace.launch.run RECIPE.yaml [KEY=VALUE ...] [--dry-run | --help]
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..comm.errors import SettingError
from ..comm.recipe import Recipe
from .config.dry_run import describe_run
from .config.load import CONFIG_FILE, read_recipe, save_recipe
from .placement import count_ranks
from .processes.child import WATCHED, Child, block_signals, print_message
from .processes.secret import create_secret
from .processes.supervisor import LAUNCHER, SHUTDOWN_S, SUMMARY_FILE, supervise

PATIENCE_S = 2 * SHUTDOWN_S
"""Seconds from an interrupt until torchrun is ended with it, and from there until it is killed."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The words of a command line."""

    recipe: str | None
    overrides: Sequence[str]
    is_dry_run: bool

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Arguments":
        """Sort the words; raises `SettingError` for an option that does not exist."""
        options = [word for word in words if word.startswith("-")]
        others = [word for word in words if not word.startswith("-")]
        if unknown := [word for word in options if word != "--dry-run"]:
            raise SettingError(f"unknown option {unknown[0]}; there are --dry-run and --help")
        recipe = others[0] if others and "=" not in others[0] else None
        return cls(recipe, others[1:] if recipe else others, bool(options))


def main(words: Sequence[str]) -> int:
    """Returns the exit code: 2 for a user's mistake, told in one message."""
    if "--help" in words or "-h" in words or not words:
        from .config.help import usage

        sys.stdout.write(usage())
        return 0
    under_torchrun = "RANK" in os.environ
    if under_torchrun:
        block_signals()
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        arguments = Arguments.parse(words)
        recipe = read_recipe(arguments.recipe, arguments.overrides)
        if arguments.is_dry_run:
            if is_first:
                sys.stdout.write(describe_run(recipe, int(os.environ.get("LOCAL_WORLD_SIZE", "0"))))
            return 0
        if recipe.run.mode == "replay":
            return replay_run(recipe)
        if is_first and LAUNCHER not in os.environ:
            prepare(recipe)
        if not under_torchrun:
            return Launch(recipe).run()
        exit_code = supervise(recipe)
        if is_first and LAUNCHER not in os.environ:
            print_summary(Path(recipe.run.dir))
        return exit_code
    except SettingError as error:
        if is_first:
            print_message(f"error: {error}")
        return 2


def replay_run(recipe: Recipe) -> int:
    """Replay in this process, with as many threads as the run had; 1 if a step differs."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from ..trainer.replay import replay_steps

    return 1 if replay_steps(recipe) else 0


def prepare(recipe: Recipe) -> None:
    """Check the recipe and make the run folder ready for the processes to come."""
    from .config.checks import check_recipe

    for warning in check_recipe(recipe):
        print_message(f"warning: {warning}")
    run_dir = Path(recipe.run.dir)
    save_recipe(recipe)
    create_secret(run_dir)
    (run_dir / SUMMARY_FILE).unlink(missing_ok=True)


def print_summary(run_dir: Path) -> dict[str, Any] | None:
    """Print how the run in `run_dir` ended, and return its summary; None if there is none."""
    from .report.summary import read_summary, show_summary
    from .report.timeline import TRACE_FILE, Timeline

    summary = read_summary(run_dir)
    if summary is not None:
        show_summary(summary, run_dir)
        Timeline.read(run_dir).write(run_dir / TRACE_FILE)
    return summary


class Launch:
    """torchrun as a child, and the way of signals to the seats."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.run_dir = Path(recipe.run.dir)
        self.received = 0
        self.deadline = float("inf")
        self.kills = iter((signal.SIGTERM, signal.SIGKILL))

    def run(self) -> int:
        """Start torchrun, wait for its end, tell how the run ended; returns the exit code.

        Waits for signals alone: SIGCHLD when torchrun ended, SIGINT or SIGTERM to pass on.
        """
        block_signals()
        own_files = self.run_dir / "logs" / "torchrun"  # empty ones; without a place of theirs they stay in /tmp
        torchrun = Child("torchrun", self._command(own_files), environment=self._environment())
        while (code := torchrun.poll()) is None:
            received = signal.sigtimedwait(WATCHED, min(3600.0, max(0.0, self.deadline - time.monotonic())))
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._interrupt(torchrun, received.si_signo)
            if time.monotonic() >= self.deadline:
                self.deadline = time.monotonic() + PATIENCE_S
                torchrun.send(next(self.kills, signal.SIGKILL))
        shutil.rmtree(own_files, ignore_errors=True)
        return self._tell_end(code)

    def _command(self, own_files: Path) -> list[str]:
        num_ranks = str(count_ranks(self.recipe.roles))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks]
        config = self.run_dir / CONFIG_FILE
        return [*torchrun, "--log-dir", str(own_files), "-m", "headrace.launch.run", str(config)]

    def _environment(self) -> Mapping[str, str]:
        return {LAUNCHER: str(os.getpid()), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}

    def _interrupt(self, torchrun: Child, number: int) -> None:
        """Hand the first signal to the seats, which end the run in order (torchrun itself would print a traceback)."""
        if self.received:
            print_message("interrupted again: the run is killed")
            self.kills, self.deadline = iter(()), time.monotonic()
            return
        self.received = number
        self.deadline = time.monotonic() + PATIENCE_S
        seats = children_of(torchrun.pid)
        print_message(
            f"{signal.Signals(number).name}: the run ends in order, within {SHUTDOWN_S:g} s (a second one kills it)"
        )
        for pid in seats:
            os.kill(pid, number)
        if not seats:
            torchrun.send(signal.SIGTERM)

    def _tell_end(self, code: int) -> int:
        summary = print_summary(self.run_dir)
        if self.received:
            return 128 + self.received
        if summary is None:
            print_message(f"error: the run ended without a summary; see {self.run_dir}/logs")
            return 1
        if code != 0 and summary.get("exit_code") == 0:
            return 1
        return int(summary.get("exit_code", code))


def children_of(pid: int) -> list[int]:
    """Process ids of the children of a process, from /proc."""
    children: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it has ended meanwhile
        if parent == pid:
            children.append(int(stat.parent.name))
    return children


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
