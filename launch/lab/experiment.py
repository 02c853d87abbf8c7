"""Runs for a comparison, one after another: each is a real run whose figures are read and kept."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from ...comm.trace import longest_lag
from ...comm.waits import waiting
from ..config.checks import check_recipe
from ..config.load import CONFIG_FILE, read_recipe, recipe_yaml, save_recipe
from ..processes.child import Child, print_message
from ..report.timeline import Timeline
from .figures import Figures, figures_of, window_of
from .plots import draw_gantt

RESULT_FILE = "outcome.json"
POLL_S = 0.5
MAX_GANTT = 64
"""Rollouts from which on a run gets no Gantt chart."""
END_S = 120.0
"""Seconds that an interrupted run has to end, more than the launcher takes until it kills the run."""


class Result(msgspec.Struct, frozen=True):
    """The result of one run. `cpu` is the busy share of the machine while the run was measured, other load included;
    `own_cpu` is the share that the run itself took. Both are None in virtual time, which no load changes. `lag_s` is the longest
    time that a process was behind its devices, in emulated seconds."""

    folder: str
    rollouts: int
    train_gpus: int
    cpu: float | None
    own_cpu: float | None
    figures: Figures
    lag_s: float = 0.0
    knobs: str = ""
    """The knobs that were set beside the split of the devices."""
    speeds: tuple[float, ...] = ()
    """Tokens per second of all seeds, in ascending order, where this is the median of several."""


def exit_code(command: Callable[[], None]) -> int:
    """Carry out a command of runs: 0, 2 after a user's mistake, which is printed, and 130 after Ctrl-C or SIGTERM."""
    try:
        command()
    except SettingError as error:
        print_message(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


@dataclass(frozen=True, slots=True)
class Experiment:
    """Runs of one recipe with different settings, each in a folder under `home`."""

    recipe: str
    overrides: Sequence[str]
    home: Path
    is_virtual: bool = False
    """Runs are in virtual time, not of processes."""
    draws: bool = True
    """Each run gets a Gantt chart."""

    def run(self, folder: str, settings: Mapping[str, object]) -> Result:
        """Run with these settings, or read the result of an earlier run of the same recipe; raises `SettingError`."""
        run_dir = self.home / (f"{folder}-virtual" if self.is_virtual else folder)
        words = [*self.overrides, *(f"{key}={value}" for key, value in settings.items()), f"run.dir={run_dir}"]
        recipe = read_recipe(self.recipe, words)
        if not recipe.data.path:
            words.append(f"data.path={self._prompts(recipe)}")
            recipe = read_recipe(self.recipe, words)
        if (result := _kept(run_dir, recipe)) is not None:
            return result
        if (run_dir / "journal.jsonl").exists() and (self.is_virtual or recipe.run.resume == "never"):
            raise SettingError(f"run.dir: the run in {run_dir} has not finished; remove that folder")
        check_recipe(recipe)
        print_message(f"{run_dir.name} runs")
        if self.is_virtual:
            from .virtual.run import VirtualRun  # it loads torch, which runs of processes do not need here

            save_recipe(recipe)
            VirtualRun(recipe).run()
            result = _result(run_dir, recipe, lambda start, end: None, None)
        else:
            monitor, own_cpu = CpuMonitor(), OwnCpu()
            if code := monitor.watch([sys.executable, "-m", "headrace.launch.run", self.recipe, *words]):
                raise SettingError(f"run.dir: the run in {run_dir} ended with {code}; see its logs")
            result = _result(run_dir, recipe, monitor.share, own_cpu.share())
        if self.draws and result.rollouts < MAX_GANTT:
            draw_gantt(Timeline.read(run_dir), run_dir.name, run_dir / "gantt.png")
        (run_dir / RESULT_FILE).write_bytes(msgspec.json.encode(result))
        return result

    def _prompts(self, recipe: Recipe) -> Path:
        """Rows for all groups of the run; an emulated rollout does not read them."""
        path = self.home / "prompts.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        num_rows = recipe.run.steps * recipe.batch.prompts_per_step
        path.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(num_rows)), encoding="utf-8")
        return path


class CpuMonitor:
    """Samples of how busy the machine is while a run is under way."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float]] = []

    def watch(self, command: Sequence[str]) -> int:
        """Run a command to its end; returns its exit code. An interrupt here ends the command in order first."""
        run = Child("the run", command, console=False, death_signal=signal.SIGTERM)
        try:
            while (code := run.poll()) is None:
                self._samples.append((time.time(), *busy_and_all()))
                time.sleep(POLL_S)
            return code
        finally:
            if run.poll() is None:
                run.send(signal.SIGTERM)
                with waiting(run.name, "its end", END_S) as wait:
                    wait.until(lambda: run.poll() is not None, POLL_S)

    def share(self, start: float, end: float) -> float:
        """Share of the machine's CPU that was busy between two times of the wall clock, to the nearest samples."""
        inside = [sample for sample in self._samples if start - POLL_S <= sample[0] <= end + POLL_S]
        return (inside[-1][1] - inside[0][1]) / (inside[-1][2] - inside[0][2])


class OwnCpu:
    """The share of the machine that the child processes take from now on."""

    def __init__(self) -> None:
        self._before = os.times()

    def share(self) -> float:
        after, before = os.times(), self._before
        busy = after.children_user + after.children_system - before.children_user - before.children_system
        return busy / (after.elapsed - before.elapsed) / (os.cpu_count() or 1)


def busy_and_all() -> tuple[float, float]:
    """Ticks that all CPUs of this machine were busy, and all ticks, since it started."""
    ticks = [float(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _result(
    run_dir: Path, recipe: Recipe, cpu: Callable[[float, float], float | None], own_cpu: float | None
) -> Result:
    """The figures of a finished run."""
    timeline = Timeline.read(run_dir)
    window = window_of(timeline, recipe.run.steps)
    return Result(
        folder=str(run_dir),
        rollouts=recipe.roles.rollout,
        train_gpus=recipe.emulated.train_gpus,
        cpu=cpu(window.start / timeline.speed, window.end / timeline.speed),
        own_cpu=own_cpu,
        figures=figures_of(run_dir, timeline, window, recipe.emulated.prefill_us * 1e-6),
        lag_s=longest_lag(run_dir),
    )


def _kept(run_dir: Path, recipe: Recipe) -> Result | None:
    """The result of a finished run of this recipe, None without one. Raises `SettingError` for a run of another recipe."""
    config, kept = run_dir / CONFIG_FILE, run_dir / RESULT_FILE
    if not kept.exists():
        return None
    if config.read_text(encoding="utf-8") != recipe_yaml(recipe):
        raise SettingError(f"run.dir: {run_dir} holds a run of another recipe; choose another run.dir or remove it")
    return msgspec.json.decode(kept.read_bytes(), type=Result)
