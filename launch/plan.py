"""Plans a run: simulates splits of its devices in virtual time, and proposes the fastest.

    python -m headrace.launch.plan RECIPE.yaml [KEY=VALUE ...] [--from RUN] [--gpus N] [--steps N] [--runs N]

The devices are those of the finished run RUN, of a short warm-up run of RECIPE, or RECIPE's own if it emulates them. After a
measured run it also prints what the simulation predicts for the run's own split beside what was measured. docs/planner.md
explains the figures.
"""

import argparse
import signal
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec import structs

from ..comm.errors import SettingError
from ..comm.recipe import Recipe
from ..rollout.generators.emulated_device import EmulatedDevice, response_length
from .config.checks import is_emulated
from .config.load import CONFIG_FILE, read_recipe, recipe_yaml
from .processes.child import print_message
from .report.experiment import Experiment
from .report.figures import LAST_STEPS, WARM_UP_STEPS, Figures, figures_of
from .report.profile import emulated_recipe, measured_part, profile_of
from .report.tuning import Knobs, Ladder, climb

WARM_UP = 20
"""Steps of a warm-up run."""
MOST_STEPS = 24
"""Steps of a simulated run, unless the recipe has fewer."""
LEAST_STEPS = WARM_UP_STEPS + LAST_STEPS + 1
SAMPLE = 256
"""Responses whose lengths give the mean ones."""


@dataclass(frozen=True, slots=True)
class Devices:
    """A recipe on emulated devices, and how many of them there are."""

    recipe: Recipe
    num_gpus: int

    @staticmethod
    def of(recipe: Recipe, num_gpus: int | None = None) -> "Devices":
        """The devices of an emulated recipe, or `num_gpus` like them. Raises `SettingError` for too few."""
        e = recipe.emulated
        if e.colocated:
            raise SettingError("emulated.colocated: colocated devices have no split to plan")
        total = e.train_gpus + e.gpus_per_rollout * recipe.roles.rollout if num_gpus is None else num_gpus
        if total <= e.gpus_per_rollout:
            raise SettingError(f"--gpus: {total} are too few; a trainer needs 1 and a rollout {e.gpus_per_rollout}")
        return Devices(recipe, total)

    @property
    def most_rollouts(self) -> int:
        return (self.num_gpus - 1) // self.recipe.emulated.gpus_per_rollout

    def train_gpus(self, knobs: Knobs) -> int:
        return self.num_gpus - self.recipe.emulated.gpus_per_rollout * knobs.rollouts

    @property
    def own(self) -> Knobs:
        """The split of the recipe."""
        return Knobs(self.recipe.roles.rollout, self.recipe.generator.max_running)

    @property
    def balanced(self) -> Knobs:
        """The split at which full rollouts generate as fast as the trainer trains, by means alone: the climb's start."""
        recipe, e = self.recipe, self.recipe.emulated
        longest, most = recipe.sampling.max_new_tokens, recipe.generator.max_running
        lengths = [response_length(recipe.run.seed, number, e, longest) for number in range(SAMPLE)]
        response = fmean(lengths)
        in_cache = e.prompt_tokens + fmean(length**2 for length in lengths) / 2 / response
        running = max(1, min(most, int(e.kv_tokens / in_cache)))
        step_s = EmulatedDevice(e, most).steps_s(running, int(running * in_cache), 1)
        trained_s = (e.prompt_tokens + response) * e.train_us * 1e-6 * running / max(response * step_s, 1e-9)
        rollouts = round(self.num_gpus / (trained_s + e.gpus_per_rollout))
        return Knobs(min(max(rollouts, 1), self.most_rollouts), most)

    def ladders(self, start: Knobs) -> dict[str, Ladder]:
        """All splits, of many devices in steps of a sixteenth; the concurrency up to twice the recipe's."""
        step, running = max(1, start.rollouts // 16), start.max_running or 1
        splits = {start.rollouts, *range(start.rollouts % step or step, self.most_rollouts + 1, step)}
        return {
            "rollouts": sorted(splits),
            "max_running": sorted({max(1, running // 4), max(1, running // 2), running, 2 * running}),
        }


@dataclass(slots=True)
class Simulation:
    """Simulated runs of some devices; a run that was simulated before is read again."""

    devices: Devices
    experiment: Experiment

    @staticmethod
    def of(devices: Devices, home: Path) -> "Simulation":
        """Its runs are under `home`, in a folder for these devices."""
        text = recipe_yaml(devices.recipe)
        folder = home / f"{zlib.crc32(text.encode()):08x}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "devices.yaml").write_text(text, encoding="utf-8")
        return Simulation(devices, Experiment(str(folder / "devices.yaml"), [], folder, is_virtual=True, draws=False))

    def figures(self, knobs: Knobs) -> Figures:
        train_gpus = self.devices.train_gpus(knobs)
        folder = "-".join(f"{value}{key.split('.')[1]}" for key, value in knobs.settings.items())
        return self.experiment.run(
            f"{folder}-{train_gpus}gpus", {**knobs.settings, "emulated.train_gpus": train_gpus}
        ).figures

    def best(self, budget: int) -> Knobs:
        """The fastest knobs that a climb of at most `budget` runs finds from the balanced ones."""
        start = self.devices.balanced
        return climb(start, self.devices.ladders(start), lambda knobs: self.figures(knobs).tokens_per_s, budget)


def main(words: Sequence[str]) -> int:
    """Returns the exit code: 2 for a user's mistake, 130 after Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser("python -m headrace.launch.plan", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", help="a recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the recipe")
    parser.add_argument("--from", dest="run", type=Path, metavar="RUN", help="folder of a finished run to measure")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs to divide; default: the recipe's")
    parser.add_argument("--steps", type=int, metavar="N", help=f"steps of a simulated run; at most {MOST_STEPS} else")
    parser.add_argument("--runs", type=int, default=24, metavar="N", help="most simulated runs (24)")
    arguments = parser.parse_intermixed_args(words)
    try:
        recipe = read_recipe(arguments.recipe, arguments.overrides)
        steps = min(recipe.run.steps, MOST_STEPS) if arguments.steps is None else arguments.steps
        if steps < LEAST_STEPS or arguments.runs < 1:
            raise SettingError(f"--steps (or run.steps): at least {LEAST_STEPS}, to be measured; --runs: at least 1")
        plan(recipe, arguments, steps)
    except SettingError as error:
        print_message(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def plan(recipe: Recipe, arguments: argparse.Namespace, steps: int) -> None:
    """Measure, simulate and print."""
    home, run = Path(f"{recipe.run.dir}-plan"), arguments.run
    if run is None and not is_emulated(recipe):
        warm_up = Experiment(arguments.recipe, arguments.overrides, home, draws=False)
        run = Path(warm_up.run("warm-up", {"run.steps": WARM_UP}).folder)
    is_real = not is_emulated(recipe)
    if run is not None:
        measured = _recipe_of(run)
        own = _emulated(measured, run, measured, steps)
        if is_emulated(measured) != is_emulated(recipe):
            raise SettingError("--from: of recipe and run only one emulates its devices")
        simulation = Simulation.of(Devices.of(own), home)
        predicted = simulation.figures(simulation.devices.own)
        print("\n".join(comparison(predicted, measured_figures(run, own), simulation.devices)), flush=True)
        recipe = _emulated(recipe, run, measured, steps)
    else:
        recipe = structs.replace(recipe, run=structs.replace(recipe.run, steps=steps))
    simulation = Simulation.of(Devices.of(recipe, arguments.gpus), home)
    print("\n".join(proposal(simulation, simulation.best(arguments.runs), is_real=is_real)))


def _recipe_of(run: Path) -> Recipe:
    """The recipe of a run folder; raises `SettingError` without one."""
    if not (run / CONFIG_FILE).exists():
        raise SettingError(f"--from: {run} has no {CONFIG_FILE}; name the folder of a finished run")
    return read_recipe(run / CONFIG_FILE)


def _emulated(recipe: Recipe, run: Path, measured: Recipe, steps: int) -> Recipe:
    """A recipe on the devices that `run` measured; those of an emulated run are known."""
    if is_emulated(measured):
        devices = structs.replace(measured.emulated, train_gpus=recipe.emulated.train_gpus)
        recipe = structs.replace(recipe, emulated=devices)
    else:
        recipe = emulated_recipe(recipe, profile_of(run, measured))
    return structs.replace(recipe, run=structs.replace(recipe.run, steps=steps))


def measured_figures(run: Path, own: Recipe) -> Figures:
    """The figures of a finished run."""
    timeline, window = measured_part(run)
    return figures_of(run, timeline, window, own.emulated.prefill_us * 1e-6)


def comparison(predicted: Figures, measured: Figures, devices: Devices) -> Iterator[str]:
    """The prediction for a run's own split beside the run."""
    yield f"{_split(devices, devices.own)}: predicted and measured"
    of_run, of_plan = _cells(measured), _cells(predicted)
    yield from _table({name: (of_plan[name], of_run[name]) for name in of_run}, ("predicted", "measured"))
    yield f"predicted over measured tokens/s: {predicted.tokens_per_s / measured.tokens_per_s:.3f}"
    yield ""


def proposal(simulation: Simulation, best: Knobs, *, is_real: bool) -> Iterator[str]:
    """The proposed settings, and their figures beside those of the present split, where that is one of these devices."""
    devices = simulation.devices
    e, own = devices.recipe.emulated, devices.own
    columns = {"proposed": _cells(simulation.figures(best))}
    if devices.train_gpus(own) == e.train_gpus:
        columns["present"] = _cells(simulation.figures(own))
    yield f"proposed for {devices.num_gpus} GPUs: {_split(devices, best)}"
    yield from _table(
        {name: tuple(cells[name] for cells in columns.values()) for name in columns["proposed"]}, [*columns]
    )
    ranks = e.gpus_per_rollout if is_real else 1
    trainer = "roles.actor" if is_real else "emulated.train_gpus"
    yield "settings: " + " ".join((
        f"{trainer}={devices.train_gpus(best)}",
        f"roles.relay={msgspec.json.encode(devices.recipe.roles.relay).decode()}",
        f"roles.rollout={best.rollouts * ranks}",
        f"generator.max_running={best.max_running}",
        f"optimizer.micro_tokens={devices.recipe.optimizer.micro_tokens}",
    ))  # fmt: skip


def _split(devices: Devices, knobs: Knobs) -> str:
    per_rollout = devices.recipe.emulated.gpus_per_rollout
    relays = devices.recipe.roles.relay or "one a host"
    return (
        f"actor {devices.train_gpus(knobs)} : relay {relays} : rollout {knobs.rollouts} (x {per_rollout}), "
        f"{knobs.max_running} trajectories each"
    )


def _cells(figures: Figures) -> dict[str, str]:
    staleness = sum(int(lag) * share for lag, share in figures.staleness.items())
    return {
        "tokens/s": f"{figures.tokens_per_s:,.0f}",
        "s/step": f"{figures.step_s:.3g}",
        "staleness": f"{staleness:.2f}",
        "idle trainer": f"{figures.idle_actor:.1%}",
        "idle rollouts": f"{figures.idle_rollout:.1%}",
        "latency, s": f"{figures.latency.mean:.3g}",
    }


def _table(rows: Mapping[str, Sequence[str]], heads: Sequence[str]) -> Iterator[str]:
    for name, cells in {"": heads, **rows}.items():
        yield f"{name:14}" + "".join(f"{cell:>12}" for cell in cells)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the present run like Ctrl-C
    sys.exit(main(sys.argv[1:]))
