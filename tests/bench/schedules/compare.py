"""Compares the schedules: runs them in turn on the same prompts, seeds and devices, and tabulates their figures.

    python tests/bench compare RECIPE.yaml [KEY=VALUE ...] [--gpus N ...] [--fixed-batch GROUPS] [--repack-train-gpus N]
        [--only NAME ...] [--tune RUNS] [--seeds N] [--json FILE]

RECIPE emulates its devices. Each run is one in virtual time (`launch/lab/virtual`) in its own folder under `run.dir`; a run of the same recipe that is finished there is not repeated. docs/develop/lab.md explains the rows.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.comm.errors import SettingError
from headrace.comm.recipe import Recipe
from headrace.launch.command_line import exit_code
from headrace.launch.config.load import read_recipe
from headrace.launch.lab.experiment import Experiment
from headrace.launch.lab.settings import lab_of
from headrace.launch.lab.tuning import climb
from headrace.launch.processes.child import print_message
from headrace.relay.queue import schedules

from ..harness import Measurement, write_measurements
from .knobs import KNOBS, Knobs, key_of, ladders, other_devices, read_tuned, save_tuned, starts
from .paired_latency import paired_table
from .plots import draw_comparison, draw_scaling, pyplot
from .results import Result, run_variant
from .scaling import curves_of, scaling_table

BOUNDED = "headrace-4"
"""`headrace` with a staleness of at most 4, which published runs keep (Laminar, Table 3)."""
SCHEDULES = ("sync-colocated", *schedules.SCHEDULES, BOUNDED)
REPACK = ("repack-off", "repack-on")
ABLATION = {
    "sync": "whole-batch barrier",
    "stream_sync": "+ streaming",
    "stream": "+ delayed update",
    "headrace": "+ no barrier, weights by relay",
}
"""The technique that each schedule adds to the one before it."""
REPACK_ROLLOUTS = 16
REPACK_TRAIN_GPUS = 256
REPACK_GROUPS = 512
"""The size at which repack is measured. It is measured on generation: with a trainer that never makes it wait, and the global batch of Laminar's section 9."""
SET_BY_ROWS = ("run.schedule", "batch.prompts_per_step", "lab.colocated")
"""Settings of which each row has its own value."""
GROUPS_PER_GPU = 4
"""Groups of a global batch per GPU: 512 groups on 128 GPUs (Laminar, Table 1 and section 9)."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One run of the comparison. In the colocated form all GPUs generate and all train."""

    name: str
    num_gpus: int
    knobs: Knobs
    gpus_per_rollout: int
    groups: int = 0
    """Groups of a global batch; 0 makes it proportional to the GPUs."""

    @property
    def folder(self) -> str:
        batch = f"-{self.groups}groups" if self.groups else ""
        chosen = "".join(f"-{value}{key.split('.')[1]}" for key, value in self.knobs.settings.items())
        return f"{self.name}-{self.num_gpus}gpus{batch}{chosen}"

    @property
    def num_groups(self) -> int:
        """Groups of a global batch."""
        return REPACK_GROUPS if self.name in REPACK else self.groups or GROUPS_PER_GPU * self.num_gpus

    @property
    def train_gpus(self) -> int:
        is_colocated = self.name == "sync-colocated"
        return self.num_gpus if is_colocated else self.num_gpus - self.gpus_per_rollout * self.knobs.rollouts

    @property
    def schedule(self) -> str:
        others = {"sync-colocated": "sync", **dict.fromkeys((*REPACK, BOUNDED), "headrace")}
        return others.get(self.name, self.name)

    @property
    def settings(self) -> dict[str, object]:
        is_colocated = self.name == "sync-colocated"
        return {
            "run.schedule": self.schedule,
            **self.knobs.settings,
            "batch.prompts_per_step": self.num_groups,
            "lab.train_gpus": self.train_gpus,
            "lab.colocated": str(is_colocated).lower(),
            **({"repack.period_s": 0} if self.name == "repack-off" else {}),
            **({"queue.max_staleness": 4} if self.name == BOUNDED else {}),
        }


def main(words: Sequence[str]) -> int:
    """Returns the exit code: 2 for a user's mistake, 130 after Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser("python tests/bench compare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", help="a recipe of emulated devices")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the recipe")
    parser.add_argument("--gpus", type=int, nargs="+", default=[], help="GPUs in all; default: the recipe's")
    parser.add_argument(
        "--fixed-batch", type=int, default=0, metavar="GROUPS", help="the same batch on any number of GPUs"
    )
    parser.add_argument("--only", nargs="+", default=[*SCHEDULES, *REPACK], choices=[*SCHEDULES, *REPACK])
    parser.add_argument(
        "--repack-train-gpus", type=int, default=REPACK_TRAIN_GPUS, metavar="N",
        help="GPUs that train beside repack-off and repack-on",
    )  # fmt: skip
    parser.add_argument(
        "--tune",
        type=int,
        default=0,
        metavar="RUNS",
        help="find and save each schedule's best knobs, with so many runs for each",
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each variant; the table has medians")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    arguments = parser.parse_intermixed_args(words)
    return exit_code(lambda: compare(read_recipe(arguments.recipe, arguments.overrides), arguments))


def compare(recipe: Recipe, arguments: argparse.Namespace) -> None:
    """Run the variants of each number of GPUs, then write tables, plots and rows into `run.dir`. Raises `SettingError`."""
    if not recipe.is_emulated:
        raise SettingError("rollout.engine: a comparison of schedules needs emulated devices")
    if arguments.seeds < 1 or arguments.tune < 0:
        raise SettingError("--seeds: at least 1; --tune: at least 0")
    _check_overrides(arguments.overrides, arguments.tune)
    pyplot()  # where matplotlib is missing, say so before the first run
    per_rollout = lab_of(recipe.lab).gpus_per_rollout
    experiment = Experiment(arguments.recipe, arguments.overrides, Path(recipe.run.dir))
    rows: list[Measurement] = []
    results: dict[int, dict[str, Result]] = {}
    for num_gpus in arguments.gpus or [lab_of(recipe.lab).train_gpus + per_rollout * recipe.roles.rollout]:

        def entrants(names: Sequence[str], num_gpus: int = num_gpus) -> list[Variant]:
            sizes = (num_gpus, per_rollout, arguments.fixed_batch, arguments.repack_train_gpus)
            return list(variants(arguments.recipe, names, *sizes, overrides=arguments.overrides))

        if arguments.tune:
            names = [name for name in arguments.only if name in SCHEDULES]
            tune(experiment, entrants(names), arguments.tune, lab_of(recipe.lab).profile)
        seeds = range(recipe.run.seed, recipe.run.seed + arguments.seeds)
        results[num_gpus] = run_all(experiment, entrants(arguments.only), seeds, f"compare-{num_gpus}gpus")
        rows += rows_of(results[num_gpus], num_gpus)
    if len(results) > 1:
        _write_scaling(results, experiment.home)
    if arguments.json is not None:
        write_measurements(rows, arguments.json)


def _check_overrides(overrides: Sequence[str], budget: int) -> None:
    """Saved knobs belong to the recipe without overrides that change what is tuned. Raises `SettingError` for tuning there."""
    others = other_devices(overrides)
    given = others + [key for key in KNOBS if any(word.startswith(f"{key}=") for word in overrides)]
    if budget and given:
        raise SettingError(
            f"--tune: the knobs are saved beside the recipe; set {', '.join(given)} in the recipe itself"
        )
    if ignored := [key for key in SET_BY_ROWS if any(word.startswith(f"{key}=") for word in overrides)]:
        print_message(f"no effect: {', '.join(ignored)}; each row has its own, see --only and --fixed-batch")
    if others:
        print_message(f"the recipe's tuned knobs are not used: {', '.join(others)} changed")


def run_all(experiment: Experiment, entrants: Iterable[Variant], seeds: Sequence[int], name: str) -> dict[str, Result]:
    """Run the variants, each with all seeds; writes their table and plot under a name."""
    results: dict[str, Result] = {}
    firsts: dict[str, Result] = {}
    for variant in entrants:
        runs: list[Result] = []
        for seed in seeds:
            folder = variant.folder if seed == seeds[0] else f"{variant.folder}-seed{seed}"
            runs.append(run_variant(experiment, folder, {**variant.settings, "run.seed": seed}))
        firsts[variant.name] = runs[0]
        results[variant.name] = replace(middle(runs), knobs=str(variant.knobs))
        print(table({variant.name: results[variant.name]}).splitlines()[-1], flush=True)
    text = table(results) + ablation(results)
    if set(REPACK) <= firsts.keys():
        text += paired_table(*(firsts[name] for name in REPACK))
    (experiment.home / f"{name}.md").write_text(text, encoding="utf-8")
    print(f"\n{text}", end="")
    draw_comparison(results, experiment.home / f"{name}.png")
    return results


def _write_scaling(results: Mapping[int, Mapping[str, Result]], home: Path) -> None:
    """Write, print and plot the curves of the schedules; repack is compared on devices of its own."""
    curves = curves_of(
        {num: {name: each[name].figures for name in each if name in SCHEDULES} for num, each in results.items()}
    )
    if not curves:
        return
    doubtful = {(name, num) for num, each in results.items() for name, run in each.items() if not run.more.is_settled}
    text = scaling_table(curves, "sync-colocated", doubtful)
    (home / "scaling.md").write_text(text, encoding="utf-8")
    print(f"\n{text}", end="")
    draw_scaling(curves, home / "scaling.png")


def middle(runs: Sequence[Result]) -> Result:
    """The run with the median of the tokens per second, with the tokens per second of all."""
    in_order = sorted(runs, key=lambda run: run.figures.tokens_per_s)
    speeds = tuple(run.figures.tokens_per_s for run in in_order)
    return replace(in_order[(len(runs) - 1) // 2], speeds=speeds)


def variants(
    recipe: str,
    names: Sequence[str],
    num_gpus: int,
    per_rollout: int,
    groups: int = 0,
    repack_train_gpus: int = REPACK_TRAIN_GPUS,
    overrides: Sequence[str] = (),
) -> Iterator[Variant]:
    """The variants of these names with their tuned knobs; without any, half of the GPUs generate.

    Tuned knobs are those of the recipe's own devices, batch and lengths. A knob among the overrides is the user's.
    """
    profile = lab_of(read_recipe(recipe, overrides).lab).profile
    tuned = {} if other_devices(overrides) else read_tuned(recipe).get(profile, {}).get(key_of(num_gpus, groups), {})
    for name in names:
        if name in REPACK:
            num_repack = repack_train_gpus + REPACK_ROLLOUTS * per_rollout
            yield Variant(name, num_repack, Knobs(REPACK_ROLLOUTS), per_rollout)
            continue
        is_colocated = name == "sync-colocated"
        others = {BOUNDED: tuned.get("headrace")}
        knobs = tuned.get(name) or others.get(name) or Knobs(num_gpus // (1 if is_colocated else 2) // per_rollout)
        knobs = knobs.without([word for word in overrides if not (is_colocated and word.startswith("roles.rollout="))])
        variant = Variant(name, num_gpus, knobs, per_rollout, groups)
        if knobs.rollouts < 1 or variant.train_gpus < 1:
            raise SettingError(
                f"--gpus: of {num_gpus} GPUs {name} would have {knobs.rollouts} rollouts of {per_rollout} GPUs,"
                f" and {variant.train_gpus} GPUs that train; it needs both"
            )
        yield variant


def tune(experiment: Experiment, entrants: Iterable[Variant], budget: int, profile: str) -> None:
    """Climb from each variant's present knobs with `budget` runs, and save the best beside the recipe."""
    for variant in entrants:

        def speed(knobs: Knobs, variant: Variant = variant) -> float:
            tried = replace(variant, knobs=knobs)
            figures = experiment.run(tried.folder, tried.settings)
            print_message(f"{tried.folder}: {figures.tokens_per_s:,.0f} tokens/s")
            return figures.tokens_per_s

        most_rollouts = -(-variant.num_gpus // variant.gpus_per_rollout)
        entrant = variant.name if variant.name == "sync-colocated" else variant.schedule
        begun = starts(entrant, variant.knobs, most_rollouts)[:budget]
        tops = [
            climb(knobs, ladders(entrant, knobs, most_rollouts, variant.num_groups), speed, part)
            for knobs, part in zip(
                begun, (budget - budget // 2, budget // 2) if len(begun) > 1 else (budget,), strict=True
            )
        ]
        best = max(tops, key=speed) if len(tops) > 1 else tops[0]
        save_tuned(experiment.recipe, profile, key_of(variant.num_gpus, variant.groups), variant.name, best)


def rows_of(results: Mapping[str, Result], num_gpus: int) -> Iterator[Measurement]:
    """Tokens per second of each schedule over `sync-colocated`, and the pairs that `results` allows."""
    speeds = {name: result.figures.tokens_per_s for name, result in results.items()}
    waits = {name: result.more.weight_wait_s for name, result in results.items()}
    kv_utils = {name: result.more.kv_util for name, result in results.items()}
    base = speeds.get("sync-colocated", float("nan"))
    for name in SCHEDULES:
        if name in speeds:
            yield Measurement(f"{name}-{num_gpus}gpus", "sync-colocated", speeds[name], "tok/s", speeds[name] / base)
    pairs = (
        (f"headrace-over-partial-{num_gpus}gpus", "headrace", "partial", speeds, "tok/s"),
        (f"weight-wait-{num_gpus}gpus", "headrace", "one_step", waits, "s"),
        ("repack-tokens", "repack-on", "repack-off", speeds, "tok/s"),
        ("repack-kv-utilisation", "repack-on", "repack-off", kv_utils, "share"),
    )
    for workload, ours, peer, values, unit in pairs:
        if ours in results and peer in results:
            yield Measurement(workload, peer, values[ours], unit, values[ours] / values[peer])


def table(results: Mapping[str, Result]) -> str:
    """The results in Markdown."""
    base = results.get("sync-colocated")
    rows: list[dict[str, str]] = []
    for name, result in results.items():
        f = result.figures
        more = result.more
        cells = {
            "schedule": name,
            "rollouts + train GPUs": f"{result.rollouts} + {result.train_gpus}",
            "knobs": result.knobs or "-",
            "tokens/s": f"{f.tokens_per_s:,.0f}{spread(result)}",
            "over sync-colocated": f"{f.tokens_per_s / base.figures.tokens_per_s:.2f}" if base else "-",
            "whole run (over its)": whole_run(result, base),
            "s/step": f"{f.step_s:.0f}{'' if result.more.is_settled else ' TOO FEW STEPS'}",
            "idle trainer": f"{f.idle_actor:.1%}",
            "idle rollouts": f"{f.idle_rollout:.1%}",
            "KV in use": f"{more.kv_util:.1%}",
            "computed again": f"{more.recompute_share:.1%}",
            "staleness mean (max)": f"{f.mean_staleness:.2f} ({max(map(int, f.staleness))})",
            "latency mean / max, s": f"{f.latency_s:.0f} / {more.longest_s:.0f}",
            "weight wait, s": f"{more.weight_wait_s:.1f}",
        }
        rows.append(cells)
    lines = [rows[0], ["---"] * len(rows[0]), *(cells.values() for cells in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def whole_run(result: Result, base: Result | None) -> str:
    """The tokens per second of the whole run, over those of the whole run of `base`."""
    speed = result.more.whole_tokens_per_s
    return f"{speed:,.0f}" + (f" ({speed / base.more.whole_tokens_per_s:.2f})" if base else "")


def spread(result: Result) -> str:
    """The tokens per second of the slowest and the fastest seed; empty for one seed."""
    return f" ({result.speeds[0]:,.0f} to {result.speeds[-1]:,.0f})" if len(result.speeds) > 1 else ""


def ablation(results: Mapping[str, Result]) -> str:
    """The gains of streaming and of the delayed update in Markdown, like AsyncFlow's Table 1; empty unless all ran."""
    if not ABLATION.keys() <= results.keys():
        return ""
    lines = ["", "| schedule | adds | over the barrier | gain |", "| --- | --- | --- | --- |"]
    base = 0.0
    before = 0.0
    for name, adds in ABLATION.items():
        speed = results[name].figures.tokens_per_s
        base = base or speed
        before = before or speed
        lines.append(f"| {name} | {adds} | {speed / base:.2f} | {speed / before - 1:+.1%} |")
        before = speed
    return "\n".join(lines) + "\n"
