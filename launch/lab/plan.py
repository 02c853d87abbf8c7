"""Plans a run: simulates splits of its devices in virtual time, and proposes the fastest.

    headrace plan RECIPE.yaml|NAME [KEY=VALUE ...] [--from RUN] [--gpus N] [--steps N] [--runs N]

The devices are those of the finished run RUN, of a short warm-up run of RECIPE, or RECIPE's own if it emulates them. After a
measured run it also prints what the simulation predicts for the run's own split beside what was measured. docs/use/planner.md
explains the figures.
"""

import argparse
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import msgspec
from msgspec import structs

from ...comm.errors import SettingError
from ...comm.recipe import Recipe, ScheduleName
from ...relay.queue.schedules import SCHEDULES
from ...trainer.policy.checkpoint_files import find_checkpoint
from ..config.gpus import Gpus
from ..config.load import read_recipe, recipe_yaml
from ..config.memory_plan import MemoryPlan
from ..config.model_files import read_config
from ..config.run_folder import CONFIG_FILE, read_summary
from ..placement import place_ranks
from ..recipes.names import find_recipe
from ..report.planned import (
    LAST_STEPS,
    PREDICTION_FILE,
    WARM_UP_STEPS,
    Prediction,
    job_digest,
    measured_steps,
    plan_folder,
    settles,
    with_prediction,
)
from .devices import Devices
from .emulated.transfer import EmulatedTransfer
from .experiment import Experiment
from .figures import Figures, figures_of
from .profile import emulated_recipe, measured_part, profile_of, relay_seconds
from .settings import lab_of
from .tuning import Knobs, climb
from .warm_up import warm_up

MOST_STEPS = 24
"""Steps of a simulated run, unless the recipe has fewer."""
LEAST_STEPS = WARM_UP_STEPS + LAST_STEPS + 1
WORTH = 1.01
"""Smallest gain in tokens/s for which a larger micro-batch is proposed."""
SCHEDULE_WORTH = 1.03
"""Smallest gain in tokens/s for which another schedule is proposed."""
RELAY_BUSY = 0.5
"""Busy share above which a relay, which uses one CPU core, counts as too busy."""


@dataclass(slots=True)
class Simulation:
    """Simulated runs of some devices; a run that was simulated before is read again."""

    devices: Devices
    experiment: Experiment
    resets: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    """Settings of the job that its schedule may not have, with their values in these runs."""

    @staticmethod
    def of(devices: Devices, home: Path) -> "Simulation":
        """Its runs are under `home`, in a folder for these devices."""
        text = recipe_yaml(devices.recipe)
        folder = home / f"{zlib.crc32(text.encode()):08x}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "devices.yaml").write_text(text, encoding="utf-8")
        return Simulation(devices, Experiment(str(folder / "devices.yaml"), [], folder))

    @property
    def schedule(self) -> ScheduleName:
        return self.devices.recipe.run.schedule

    def figures(self, knobs: Knobs, times: int = 1) -> Figures:
        """The figures of a run whose micro-batches are `times` as large as the recipe's; one rank's GPUs share one."""
        recipe = self.devices.recipe
        train_gpus = self.devices.train_gpus(knobs)
        own = lab_of(recipe.lab)
        ranks = lab_of({**recipe.lab, "train_gpus": train_gpus}).trainer_ranks
        shared = times * recipe.optimizer.micro_batch * own.trainer_ranks * train_gpus
        micro_tokens = max(1, shared // (own.train_gpus * ranks))
        settings = {**knobs.settings, "lab.train_gpus": train_gpus, "optimizer.micro_tokens": micro_tokens}
        folder = "-".join(f"{value}{key.split('.')[1]}" for key, value in settings.items())
        return self.experiment.run(folder, settings)

    def with_schedule(self, name: ScheduleName) -> "Simulation":
        """Runs of the same devices with another schedule, without the settings that this one may not have."""
        recipe = self.devices.recipe
        if name == recipe.run.schedule:
            return self
        has_barrier = SCHEDULES[name].staleness is not None
        other = structs.replace(
            recipe,
            run=structs.replace(recipe.run, schedule=name),
            queue=structs.replace(recipe.queue, max_staleness=None, lead="auto") if has_barrier else recipe.queue,
            rollout=structs.replace(recipe.rollout, max_age=None),
        )
        resets: dict[str, str | None] = {}
        if other.queue.max_staleness != recipe.queue.max_staleness:
            resets["queue.max_staleness"] = None
        if other.queue.lead != recipe.queue.lead:
            resets["queue.lead"] = "auto"
        if other.rollout.max_age != recipe.rollout.max_age:
            resets["rollout.max_age"] = None
        simulation = Simulation.of(Devices(other, self.devices.num_gpus), self.experiment.home.parent)
        return replace(simulation, resets=resets)

    def schedules(self, knobs: Knobs) -> "dict[ScheduleName, Figures]":
        """The figures of each schedule with the same knobs."""
        names: tuple[ScheduleName, ...] = get_args(ScheduleName)
        return {name: self.with_schedule(name).figures(knobs) for name in names}

    def best(self, budget: int) -> Knobs:
        """The fastest knobs that a climb of at most `budget` runs finds from the balanced ones."""
        start = self.devices.balanced
        return climb(start, self.devices.ladders(start), lambda knobs: self.figures(knobs).tokens_per_s, budget)

    def micro_batches(self, knobs: Knobs, most: float) -> int:
        """How many times as large micro-batches should be: doubled, up to `most` times, as long as that gains 1 % in tokens/s."""
        times = 1
        costs_time = lab_of(self.devices.recipe.lab).micro_batch_s > 0
        while costs_time and 2 * times <= most:
            if self.figures(knobs, 2 * times).tokens_per_s < WORTH * self.figures(knobs, times).tokens_per_s:
                break
            times *= 2
        return times


@dataclass(frozen=True, slots=True)
class MeasuredJob:
    """The recipe of a job on devices that were measured, and the work of the relays in the measured run."""

    recipe: Recipe
    relay_s: float
    """Seconds of a processor that the relays together took for a token."""
    measured_relays: int = 1
    """Relays of the measured run, one on each of its hosts at least by default."""

    @property
    def num_relays(self) -> int:
        """The recipe's number of relays; null has that of the measured run."""
        return self.recipe.roles.relay or self.measured_relays

    def with_split(self, devices: Devices, knobs: Knobs) -> Recipe:
        roles = structs.replace(
            self.recipe.roles, actor=devices.train_gpus(knobs), rollout=knobs.rollouts * self.recipe.rollout.tp
        )
        return structs.replace(self.recipe, roles=roles)

    def relays(self, tokens_per_s: float) -> tuple[int, float]:
        """How many relays are enough, and the share of its time that each of the present ones is busy.

        Beside another relay each row has a second copy, so the second one doubles the work. Never fewer than the present ones.
        """
        num = self.num_relays
        one_copy = self.relay_s * tokens_per_s / min(self.measured_relays, 2)
        busy = one_copy * min(num, 2) / num
        return num if busy <= RELAY_BUSY else max(2, math.ceil(2 * one_copy / RELAY_BUSY)), busy


def plan(arguments: argparse.Namespace) -> None:
    """Measure, simulate and print. Raises `SettingError`."""
    file = find_recipe(arguments.recipe)
    recipe = read_recipe(file, arguments.overrides)
    steps = min(recipe.run.steps, MOST_STEPS) if arguments.steps is None else arguments.steps
    if steps < LEAST_STEPS or arguments.runs < 1:
        raise SettingError(f"--steps (or run.steps): at least {LEAST_STEPS}, to be measured; --runs: at least 1")
    home = plan_folder(recipe.run.dir)
    run = arguments.run
    if run is None and not recipe.is_emulated:
        run = home / "warm-up"
        warm_up(file, arguments.overrides, run)
    job: MeasuredJob | None = None
    if run is not None:
        measured = _recipe_of(run)
        own = _emulated(measured, run, measured, steps)
        if measured.is_emulated != recipe.is_emulated:
            raise SettingError("--from: the recipe and the run must both emulate their devices, or neither")
        simulation = Simulation.of(Devices.of(own), home)
        predicted = simulation.figures(simulation.devices.own)
        timeline, window = measured_part(run)
        print("\n".join(comparison(predicted, figures_of(run, timeline, window), simulation.devices)), flush=True)
        if (summary := read_summary(run)) is not None:
            prediction = _prediction_of(predicted, simulation.devices.recipe.run.steps)
            with_prediction(run, summary, prediction, (window.first, window.last))
        if not recipe.is_emulated:
            job = MeasuredJob(recipe, relay_seconds(run, measured.roles.relay or 1), measured.roles.relay or 1)
        recipe = _emulated(recipe, run, measured, steps)
    else:
        recipe = structs.replace(recipe, run=structs.replace(recipe.run, steps=steps))
    simulation = Simulation.of(Devices.of(recipe, arguments.gpus), home)
    planned = recipe if job is None else job.recipe
    best = simulation.best(arguments.runs)
    speeds = simulation.schedules(best)
    print("\n".join(_schedule_lines(simulation.schedule, speeds)), flush=True)
    fastest = max(speeds, key=lambda name: speeds[name].tokens_per_s)
    if speeds[fastest].tokens_per_s > SCHEDULE_WORTH * speeds[simulation.schedule].tokens_per_s:
        simulation = simulation.with_schedule(fastest)
        best = simulation.best(arguments.runs)
    print("\n".join(proposal(simulation, best, job, home, planned)))


def _recipe_of(run: Path) -> Recipe:
    """The recipe of a run folder; raises `SettingError` without one."""
    if not (run / CONFIG_FILE).exists():
        raise SettingError(f"--from: {run} has no {CONFIG_FILE}; name the folder of a finished run")
    return read_recipe(run / CONFIG_FILE)


def _emulated(recipe: Recipe, run: Path, measured: Recipe, steps: int) -> Recipe:
    """A recipe on the devices that `run` measured; those of an emulated run are known."""
    if measured.is_emulated:
        devices = {**measured.lab, "train_gpus": lab_of(recipe.lab).train_gpus}
        recipe = structs.replace(recipe, lab=devices)
    else:
        recipe = emulated_recipe(recipe, profile_of(run, measured))
    return structs.replace(recipe, run=structs.replace(recipe.run, steps=steps))


def comparison(predicted: Figures, measured: Figures, devices: Devices) -> Iterator[str]:
    """The prediction for a run's own split beside the run."""
    yield f"{_split(devices, devices.own)}: predicted and measured"
    of_run = _cells(measured)
    of_plan = _cells(predicted)
    yield from _table({name: (of_plan[name], of_run[name]) for name in of_run}, ("predicted", "measured"))
    yield f"predicted over measured tokens/s: {predicted.tokens_per_s / measured.tokens_per_s:.3f}"
    yield ""


def _schedule_lines(own: ScheduleName, speeds: Mapping[ScheduleName, Figures]) -> Iterator[str]:
    """The schedules with the same split, the fastest first."""
    yield "schedules with that split, tokens/s (mean staleness):"
    for name in sorted(speeds, key=lambda name: -speeds[name].tokens_per_s):
        mark = "  the recipe's" if name == own else ""
        yield f"  {name:12}{speeds[name].tokens_per_s:>12,.0f}{f'({speeds[name].mean_staleness:.2f})':>8}{mark}"
    yield ""


def _prediction_of(
    figures: Figures, num_steps: int, settings: Mapping[str, object] | None = None, job: str = ""
) -> Prediction:
    values = (figures.tokens_per_s, figures.step_s, figures.mean_staleness)
    return Prediction(dict(settings or {}), *values, measured_steps(num_steps), job)


def proposal(
    simulation: Simulation,
    best: Knobs,
    job: MeasuredJob | None,
    home: Path | None = None,
    planned: Recipe | None = None,
) -> Iterator[str]:
    """The proposed settings, and their figures beside those of the present split, where that is one of these devices.

    Under `home` it keeps the prediction for a run of the recipe `planned` with these settings.
    """
    devices = simulation.devices
    e = lab_of(devices.recipe.lab)
    own = devices.own
    micro_tokens = (devices.recipe if job is None else job.recipe).optimizer.micro_batch
    most = None if job is None else most_micro_tokens(job.with_split(devices, best))
    times = simulation.micro_batches(best, math.inf if most is None else most / micro_tokens)
    found = simulation.figures(best, times)
    columns = {"proposed": _cells(found)}
    if devices.train_gpus(own) == e.train_gpus:
        columns["present"] = _cells(simulation.figures(own))
    yield f"proposed for {devices.num_gpus} GPUs: {_split(devices, best)}"
    yield from _table(
        {name: tuple(cells[name] for cells in columns.values()) for name in columns["proposed"]}, [*columns]
    )
    if not settles(found.mean_staleness, devices.recipe.run.steps):
        yield (
            f"too few steps: with a staleness of {found.mean_staleness:.1f} the queue still grows in a simulated run of"
            f" {devices.recipe.run.steps} steps, so these figures are too low; give --steps"
            f" {math.ceil(6 * found.mean_staleness)} or more"
        )
    relays = devices.recipe.roles.relay
    transfer = EmulatedTransfer(e, devices.recipe.run.schedule)
    weights_s = transfer.push_s + transfer.chain_s + transfer.pull_s
    yield f"weights: the rollouts have a version {weights_s:.3g} s after its step, {weights_s / found.step_s:.1%} of a step"
    if job is not None:
        enough, busy = job.relays(found.tokens_per_s)
        relays = enough if enough > job.num_relays else relays
        yield f"relays: {job.num_relays}, busy {busy:.1%} of the time at that speed; needed: {enough}"
        yield _micro_batch_line(e.micro_batch_s, found, most)
    micro = int(min(times * micro_tokens, math.inf if most is None else most))
    train_gpus = devices.train_gpus(best)
    found_settings = {
        "run.schedule": simulation.schedule,
        "lab.train_gpus" if job is None else "roles.actor": train_gpus,
        "roles.relay": msgspec.json.encode(relays).decode(),
        "roles.rollout": best.rollouts * (1 if job is None else e.gpus_per_rollout),
        "generator.max_running": best.max_running,
        "optimizer.micro_tokens": micro,
        **simulation.resets,
    }
    words = {key: "null" if value is None else value for key, value in found_settings.items()}
    yield "settings: " + " ".join(f"{key}={value}" for key, value in words.items())
    if home is not None and planned is not None:
        kept = {key: value for key, value in found_settings.items() if key not in ("roles.relay", "lab.train_gpus")}
        prediction = _prediction_of(found, devices.recipe.run.steps, kept, job_digest(planned, kept))
        (home / PREDICTION_FILE).write_bytes(msgspec.json.encode(prediction))


def most_micro_tokens(recipe: Recipe) -> int | None:
    """The largest micro-batch for which GPUs like this host's, one for each rank, have memory; None without GPUs or the policy here."""
    gpus = Gpus.of_this_host()
    if not gpus.gb:
        return None
    places = place_ranks(recipe.roles, tp=recipe.rollout.tp)
    names = tuple(str(place.slot) for place in places if place.slot is not None)
    try:
        config = read_config(find_checkpoint(recipe.model.path))
    except SettingError:
        return None
    return MemoryPlan.micro_tokens(recipe, config, places, Gpus(names, gpus.gb))


def _micro_batch_line(micro_batch_s: float, figures: Figures, most: int | None) -> str:
    room = "without a GPU the most tokens are unknown" if most is None else f"memory is enough for {most:,} tokens"
    if not micro_batch_s:
        return f"micro-batches: this run cannot separate their fixed cost from the other costs of a step; {room}"
    share = figures.micro_batches * micro_batch_s / figures.step_s
    return (
        f"micro-batches: {micro_batch_s * 1e3:.3g} ms each in addition to their tokens, {share:.1%} of a step; {room}"
    )


def _split(devices: Devices, knobs: Knobs) -> str:
    per_rollout = lab_of(devices.recipe.lab).gpus_per_rollout
    relays = devices.recipe.roles.relay or "one a host"
    return (
        f"actor {devices.train_gpus(knobs)} : relay {relays} : rollout {knobs.rollouts} (x {per_rollout}), "
        f"{knobs.max_running} trajectories each"
    )


def _cells(figures: Figures) -> dict[str, str]:
    return {
        "tokens/s": f"{figures.tokens_per_s:,.0f}",
        "s/step": f"{figures.step_s:.3g}",
        "staleness": f"{figures.mean_staleness:.2f}",
        "idle trainer": f"{figures.idle_actor:.1%}",
        "idle rollouts": f"{figures.idle_rollout:.1%}",
        "latency, s": f"{figures.latency_s:.3g}",
        "micro-batches": f"{figures.micro_batches:.1f}",
    }


def _table(rows: Mapping[str, Sequence[str]], heads: Sequence[str]) -> Iterator[str]:
    for name, cells in {"": heads, **rows}.items():
        yield f"{name:14}" + "".join(f"{cell:>12}" for cell in cells)
