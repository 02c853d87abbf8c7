"""One run after the other for a comparison: started like any run, its machine's CPU watched, its figures read and kept."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from ..config.checks import check_recipe
from ..config.load import CONFIG_FILE, read_recipe, recipe_yaml
from ..processes.child import print_message
from .figures import Figures, figures_of, window_of
from .timeline import Timeline

RESULT_FILE = "outcome.json"
POLL_S = 0.5


class Result(msgspec.Struct, frozen=True):
    """How a run came out; `cpu` is the share of the machine that was busy while it was measured, with whatever else ran,
    `own_cpu` the share that the run itself took."""

    folder: str
    rollouts: int
    train_gpus: int
    cpu: float
    own_cpu: float
    figures: Figures

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return Path(self.folder)


@dataclass(frozen=True, slots=True)
class Experiment:
    """Runs of one recipe with different settings, each in a folder under `home`."""

    recipe: str
    overrides: Sequence[str]
    home: Path

    def run(self, folder: str, settings: Mapping[str, object]) -> Result:
        """Run with these settings, or read what an earlier call with the same recipe has left; raises `SettingError`."""
        run_dir = self.home / folder
        words = [*self.overrides, *(f"{key}={value}" for key, value in settings.items()), f"run.dir={run_dir}"]
        recipe = read_recipe(self.recipe, words)
        if not recipe.data.path:
            words.append(f"data.path={self._prompts(recipe)}")
            recipe = read_recipe(self.recipe, words)
        if (outcome := _kept(run_dir, recipe)) is not None:
            return outcome
        check_recipe(recipe)
        print_message(f"{folder} runs")
        watch = CpuMonitor()
        started, before = time.monotonic(), os.times()
        code = watch.watch(subprocess.Popen([sys.executable, "-m", "headrace.launch.run", self.recipe, *words],
                                          stdout=subprocess.DEVNULL))  # fmt: skip
        if code != 0:
            raise SettingError(f"run.dir: the run in {run_dir} ended with {code}; see its logs")
        seconds, after = time.monotonic() - started, os.times()
        own = (after.children_user + after.children_system - before.children_user - before.children_system) / seconds
        timeline = Timeline.read(run_dir)
        window = window_of(timeline, recipe.run.steps)
        outcome = Result(
            folder=str(run_dir),
            rollouts=recipe.roles.rollout,
            train_gpus=recipe.emulated.train_gpus,
            cpu=watch.share(window.start / timeline.speed, window.end / timeline.speed),
            own_cpu=own / (os.cpu_count() or 1),
            figures=figures_of(run_dir, recipe.emulated.prefill_us * 1e-6),
        )
        (run_dir / RESULT_FILE).write_bytes(msgspec.json.encode(outcome))
        return outcome

    def _prompts(self, recipe: Recipe) -> Path:
        """Rows for as many groups as the run takes; an emulated rollout does not read them."""
        path = self.home / "prompts.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        num_rows = recipe.run.steps * recipe.batch.prompts_per_step
        path.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(num_rows)), encoding="utf-8")
        return path


class CpuMonitor:
    """Samples of how busy the machine is, while a process runs."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float]] = []

    def watch(self, process: "subprocess.Popen[bytes]") -> int:
        """Watch until the process ends; returns its exit code."""
        try:
            while True:
                self._samples.append((time.time(), *busy_and_all()))
                try:
                    return process.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()

    def share(self, start: float, end: float) -> float:
        """Share of the machine's CPU that was busy between two moments of the wall clock, as near as the samples lie."""
        inside = [sample for sample in self._samples if start - POLL_S <= sample[0] <= end + POLL_S]
        return (inside[-1][1] - inside[0][1]) / (inside[-1][2] - inside[0][2])


def busy_and_all() -> tuple[float, float]:
    """Ticks that all CPUs of this machine were busy, and all ticks, since it started."""
    ticks = [float(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _kept(run_dir: Path, recipe: Recipe) -> Result | None:
    """The outcome of a finished run with the same recipe; None if there is none. Raises `SettingError` for another run."""
    config, kept = run_dir / CONFIG_FILE, run_dir / RESULT_FILE
    if not kept.exists():
        return None
    if config.read_text(encoding="utf-8") != recipe_yaml(recipe):
        raise SettingError(f"run.dir: {run_dir} holds a run of another recipe; choose another run.dir or remove it")
    return msgspec.json.decode(kept.read_bytes(), type=Result)
