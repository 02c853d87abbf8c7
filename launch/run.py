"""The program. Without torchrun's environment it is the launcher: it checks the recipe, starts torchrun and prints how the
run ended. Under torchrun it is the supervisor of one rank.

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

from ..comm.disk import describe_full, is_full
from ..comm.errors import SettingError
from ..comm.recipe import Recipe
from ..relay.checkpoints import CheckpointFolder
from .config.dry_run import describe_run
from .config.load import CONFIG_FILE, read_recipe, save_recipe
from .config.memory_plan import Gpus
from .placement import count_ranks
from .processes.child import WATCHED, Child, block_signals, print_message
from .processes.secret import create_secret
from .processes.supervisor import LAUNCHER, SHUTDOWN_S, SUMMARY_FILE, supervise
from .resume import choose_checkpoint

PATIENCE_S = 2 * SHUTDOWN_S
"""Seconds from an interrupt until torchrun gets SIGTERM, and from there until it is killed."""


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
            raise SettingError(f"unknown option {unknown[0]}; the options are --dry-run and --help")
        recipe = others[0] if others and "=" not in others[0] else None
        return cls(recipe, others[1:] if recipe else others, bool(options))


def main(words: Sequence[str]) -> int:
    """Returns the exit code: 2 for a user's mistake, which is one message."""
    if "--help" in words or "-h" in words or not words:
        from .config.help import usage

        sys.stdout.write(usage())
        return 0
    is_rank = "RANK" in os.environ
    is_first = os.environ.get("RANK", "0") == "0"
    if is_rank:
        block_signals()
    try:
        gpus, words = Gpus.taken_from(words)
        arguments = Arguments.parse(words)
        recipe = read_recipe(arguments.recipe, arguments.overrides)
        if arguments.is_dry_run:
            return _print_plan(recipe, gpus) if is_first else 0
        if recipe.run.mode == "replay":
            return _replay(recipe)
        return _run_rank(recipe, is_first) if is_rank else _launch(recipe)
    except OSError as error:
        if not is_full(error):
            raise
        print_message(f"error: {describe_full(Path(error.filename or '.'))}; make room there, or set another run.dir")
        return 2
    except SettingError as error:
        if is_first:
            print_message(f"error: {error}")
        return 2


def _print_plan(recipe: Recipe, gpus: Gpus | None) -> int:
    from .config.checks import check_family

    if (Path(recipe.model.path) / "config.json").exists():
        check_family(recipe, Path(recipe.model.path))
    sys.stdout.write(describe_run(recipe, int(os.environ.get("LOCAL_WORLD_SIZE", "0")), gpus))
    return 0


def _replay(recipe: Recipe) -> int:
    """Replay in this process, with as many threads as the run had; 1 if a step differs."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from ..trainer.replay import replay_steps

    return 1 if replay_steps(recipe) else 0


def _launch(recipe: Recipe) -> int:
    prepare(recipe)
    return Launch(recipe).run()


def _run_rank(recipe: Recipe, is_first: bool) -> int:
    """Supervise a rank. Without our launcher, the first rank does the launcher's work before and after."""
    is_first = is_first and LAUNCHER not in os.environ
    if is_first:
        prepare(recipe)
    exit_code = supervise(recipe)
    if is_first:
        print_summary(Path(recipe.run.dir))
    return exit_code


def prepare(recipe: Recipe) -> None:
    """Check the recipe and make the run folder ready for the processes of the run."""
    from .config.checks import check_recipe

    for warning in check_recipe(recipe):
        print_message(f"warning: {warning}")
    run_dir = Path(recipe.run.dir)
    save_recipe(recipe)
    create_secret(run_dir)
    (run_dir / SUMMARY_FILE).unlink(missing_ok=True)
    if recipe.run.resume == "auto":
        step, lines = choose_checkpoint(run_dir)
        for line in lines:
            print_message(line)
        if step is not None:
            CheckpointFolder(run_dir).set_latest(step)


def print_summary(run_dir: Path) -> dict[str, Any] | None:
    """Print how the run in `run_dir` ended and return its summary, None without one."""
    from .report.summary import read_summary, show_summary
    from .report.timeline import TRACE_FILE, Timeline

    summary = read_summary(run_dir)
    if summary is not None:
        show_summary(summary, run_dir)
        try:
            Timeline.read(run_dir).write(run_dir / TRACE_FILE)
        except OSError as error:
            print_message(f"warning: {run_dir / TRACE_FILE} is not written: {error.strerror}")
    return summary


class Launch:
    """torchrun as a child. Signals go to the supervisors, its children."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.run_dir = Path(recipe.run.dir)
        self.received = 0
        self.deadline = float("inf")
        self.kills = iter((signal.SIGTERM, signal.SIGKILL))

    def run(self) -> int:
        """Start torchrun, wait for its end, print how the run ended; returns the exit code.

        It waits for signals, at most until the deadline: SIGCHLD when torchrun has ended, others to pass on.
        """
        block_signals()
        torchrun_logs = self.run_dir / "logs" / "torchrun"  # empty files, which torchrun would leave in /tmp
        torchrun = Child("torchrun", self._command(torchrun_logs), environment=self._environment())
        while (code := torchrun.poll()) is None:
            received = signal.sigtimedwait(WATCHED, min(3600.0, max(0.0, self.deadline - time.monotonic())))
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._interrupt(torchrun, received.si_signo)
            if time.monotonic() >= self.deadline:
                self.deadline = time.monotonic() + PATIENCE_S
                torchrun.send(next(self.kills, signal.SIGKILL))
        shutil.rmtree(torchrun_logs, ignore_errors=True)
        return self._exit_code(code)

    def _command(self, log_dir: Path) -> list[str]:
        num_ranks = str(count_ranks(self.recipe.roles))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks]
        config = self.run_dir / CONFIG_FILE
        return [*torchrun, "--log-dir", str(log_dir), "-m", "headrace.launch.run", str(config)]

    def _environment(self) -> Mapping[str, str]:
        return {LAUNCHER: str(os.getpid()), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}

    def _interrupt(self, torchrun: Child, number: int) -> None:
        """Pass the first signal to the supervisors, which end the run in order; torchrun would print a traceback.

        SIGUSR1 ends nothing: the run writes a checkpoint.
        """
        supervisors = children_of(torchrun.pid)
        if number == signal.SIGUSR1:
            print_message("SIGUSR1: the run writes a checkpoint after the next step and continues")
            for pid in supervisors:
                os.kill(pid, number)
            return
        if self.received:
            print_message("interrupted again: the run is killed")
            self.kills, self.deadline = iter(()), time.monotonic()
            return
        self.received = number
        grace_s = SHUTDOWN_S + self.recipe.checkpoint.grace_s
        self.deadline = time.monotonic() + PATIENCE_S - SHUTDOWN_S + grace_s
        print_message(
            f"{signal.Signals(number).name}: the run writes a checkpoint and ends in order, within {grace_s:g} s"
            " (a second signal kills it)"
        )
        for pid in supervisors:
            os.kill(pid, number)
        if not supervisors:
            torchrun.send(signal.SIGTERM)

    def _exit_code(self, code: int) -> int:
        """Print how the run ended; `code` is torchrun's exit code."""
        summary = print_summary(self.run_dir)
        if self.received:
            return 128 + self.received
        if summary is None:
            print_message(f"error: the run ended without a summary; see {self.run_dir}/logs")
            return 1
        return int(summary.get("exit_code", code)) or (1 if code else 0)


def children_of(pid: int) -> list[int]:
    """Process ids of the children of a process, from /proc."""
    children: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # the process has ended meanwhile
        if parent == pid:
            children.append(int(stat.parent.name))
    return children


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
