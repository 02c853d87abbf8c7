"""Runs the schedules in turn on the same prompts, seeds and devices, and lays their figures side by side.

    python -m headrace.launch.compare RECIPE.yaml [KEY=VALUE ...] [--gpus N] [--only NAME ...] [--tune] [--json FILE]

RECIPE is one of emulated devices. Each run is a real one of `headrace.launch.run`, in a folder of its own under `run.dir`; one
that is finished there already, with the same recipe, is not run again. docs/schedules.md says what the rows mean.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ..comm.errors import SettingError
from ..comm.recipe import Recipe
from ..relay.queue import schedules
from .bench.harness import Measurement, write_json
from .config.checks import is_emulated
from .config.load import read_recipe
from .processes.child import print_message
from .report.experiment import Experiment, Result
from .report.plots import draw_comparison, draw_gantt
from .report.timeline import Timeline

SPLITS = Path(__file__).parent / "recipes" / "emulated-splits.json"
"""Rollouts of each entrant's best split by number of GPUs, as `--tune` found them."""
SCHEDULES = ("sync-colocated", *schedules.SCHEDULES)
REPACK = ("repack-off", "repack-on")
ABLATION = {"sync": "whole-batch barrier", "stream": "+ streaming", "headrace": "+ delayed update, no barrier"}
"""What each schedule adds to the one before it."""
CPU_LIMIT = 0.6
"""Share of the machine's CPU above which emulated devices may have been late, and a row does not count."""
REPACK_ROLLOUTS, REPACK_TRAIN_GPUS, REPACK_GROUPS = 16, 256, 512
"""With and without repack, generation is compared: beside a trainer that never keeps it waiting, with the global batch of
Laminar's section 9."""
GROUPS_PER_GPU = 4
"""Groups of a global batch per GPU: 512 groups on 128 GPUs (Laminar, Table 1 and section 9)."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One run to be compared: its name, GPUs in all, rollouts among them, and what it sets."""

    name: str
    num_gpus: int
    rollouts: int
    settings: Mapping[str, object]

    @staticmethod
    def of(name: str, num_gpus: int, rollouts: int, gpus_per_rollout: int) -> "Variant":
        """The entrant of this name; in the colocated form all GPUs generate and all train."""
        is_colocated = name == "sync-colocated"
        rollouts = num_gpus // gpus_per_rollout if is_colocated else rollouts
        schedule = {"sync-colocated": "sync", "repack-off": "headrace", "repack-on": "headrace"}.get(name, name)
        settings = {
            "run.schedule": schedule,
            "roles.rollout": rollouts,
            "batch.prompts_per_step": GROUPS_PER_GPU * num_gpus,
            "emulated.train_gpus": num_gpus if is_colocated else num_gpus - gpus_per_rollout * rollouts,
            "emulated.colocated": str(is_colocated).lower(),
            "repack.enabled": str(name != "repack-off").lower(),
        }
        return Variant(name, num_gpus, rollouts, settings)

    @property
    def folder(self) -> str:
        """Its folder under `run.dir`."""
        return f"{self.name}-{self.num_gpus}gpus-{self.rollouts}rollouts"


def main(words: Sequence[str]) -> int:
    """Returns the exit code; 2 for a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m headrace.launch.compare", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("recipe", help="a recipe of emulated devices")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the recipe")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs in all, batch scaled to them; default: the recipe's")
    parser.add_argument("--only", nargs="+", default=[*SCHEDULES, *REPACK], choices=[*SCHEDULES, *REPACK])
    parser.add_argument(
        "--tune", action="store_true", help="find each schedule's best split of the GPUs, and write it down"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    arguments = parser.parse_intermixed_args(words)
    try:
        recipe = read_recipe(arguments.recipe, arguments.overrides)
        if not is_emulated(recipe):
            raise SettingError("rollout.engine: a comparison of schedules needs emulated devices")
        compare(recipe, arguments)
    except SettingError as error:
        print_message(f"error: {error}")
        return 2
    return 0


def compare(recipe: Recipe, arguments: argparse.Namespace) -> None:
    """Run the entrants, then write table, pictures and rows into `run.dir`."""
    per_rollout = recipe.emulated.gpus_per_rollout
    num_gpus = arguments.gpus or recipe.emulated.train_gpus + per_rollout * recipe.roles.rollout
    contest = Experiment(arguments.recipe, arguments.overrides, Path(recipe.run.dir))
    if arguments.tune:
        tune(contest, [name for name in arguments.only if name in SCHEDULES], num_gpus, per_rollout)
    outcomes: dict[str, Result] = {}
    for entrant in variants(arguments.only, num_gpus, per_rollout):
        outcomes[entrant.name] = contest.run(entrant.folder, entrant.settings)
        sys.stdout.write(f"{table({entrant.name: outcomes[entrant.name]}).splitlines()[-1]}\n")
        sys.stdout.flush()
    folder = Path(recipe.run.dir)
    text = table(outcomes) + ablation(outcomes)
    (folder / f"compare-{num_gpus}gpus.md").write_text(text, encoding="utf-8")
    sys.stdout.write(f"\n{text}")
    draw_comparison({name: o.figures for name, o in outcomes.items()}, folder / f"compare-{num_gpus}gpus.png")
    for name, outcome in outcomes.items():
        timeline = Timeline.read(outcome.run_dir)
        draw_gantt(timeline, name, outcome.run_dir / "gantt.png")
    if arguments.json is not None:
        write_json(list(rows_of(outcomes)), arguments.json)


def variants(names: Sequence[str], num_gpus: int, per_rollout: int) -> Iterator[Variant]:
    """The entrants with their best splits."""
    best = splits().get(str(num_gpus), {})
    for name in names:
        if name in REPACK:
            gpus = REPACK_TRAIN_GPUS + REPACK_ROLLOUTS * per_rollout
            entrant = Variant.of(name, gpus, REPACK_ROLLOUTS, per_rollout)
            yield replace(entrant, settings={**entrant.settings, "batch.prompts_per_step": REPACK_GROUPS})
        else:
            yield Variant.of(name, num_gpus, best.get(name, num_gpus // 2 // per_rollout), per_rollout)


def tune(experiment: Experiment, names: Sequence[str], num_gpus: int, per_rollout: int) -> None:
    """From the split that is written down, go on to a neighbour as long as it is faster; write down the best."""
    for name in names:
        if name == "sync-colocated":
            continue
        found = splits()
        best = found.get(str(num_gpus), {}).get(name, num_gpus // 2 // per_rollout)
        speed: dict[int, float] = {}

        def tried(rollouts: int, name: str = name, speed: dict[int, float] = speed) -> float:
            if rollouts not in speed and 0 < rollouts < num_gpus // per_rollout:
                entrant = Variant.of(name, num_gpus, rollouts, per_rollout)
                speed[rollouts] = experiment.run(entrant.folder, entrant.settings).figures.tokens_per_s
                print_message(f"{name} on {num_gpus} GPUs with {rollouts} rollouts: {speed[rollouts]:,.0f} tokens/s")
            return speed.get(rollouts, 0.0)

        while (better := max((best - 1, best, best + 1), key=tried)) != best:
            best = better
        found.setdefault(str(num_gpus), {})[name] = best
        write_json(found, SPLITS)


def splits() -> dict[str, dict[str, int]]:
    """Rollouts by number of GPUs and name."""
    return msgspec.json.decode(SPLITS.read_bytes(), type=dict[str, dict[str, int]]) if SPLITS.exists() else {}


def rows_of(results: Mapping[str, Result]) -> Iterator[Measurement]:
    """Tokens per second of each schedule over `sync-colocated`, and the other comparisons that can be made."""
    figures = {name: outcome.figures for name, outcome in results.items()}
    base = figures.get("sync-colocated")
    for name in SCHEDULES:
        if name in figures:
            ratio = figures[name].tokens_per_s / base.tokens_per_s if base else float("nan")
            yield Measurement(name, "sync-colocated", figures[name].tokens_per_s, "tok/s", ratio)
    pairs = (
        ("headrace-over-partial", "headrace", "partial", "tokens_per_s", "tok/s"),
        ("weight-wait", "headrace", "one_step", "weight_wait_s", "s"),
        ("repack-tokens", "repack-on", "repack-off", "tokens_per_s", "tok/s"),
        ("repack-kv-utilisation", "repack-on", "repack-off", "kv_util", "share"),
    )
    for workload, ours, peer, field, unit in pairs:
        if ours in figures and peer in figures:
            value, other = getattr(figures[ours], field), getattr(figures[peer], field)
            yield Measurement(workload, peer, value, unit, value / other)


def table(results: Mapping[str, Result]) -> str:
    """The outcomes in Markdown."""
    head = (
        "schedule", "rollouts + train GPUs", "tokens/s", "over sync-colocated", "s/step", "idle trainer", "idle rollouts",
        "KV in use", "computed again", "staleness mean (max)", "latency mean / max, s", "weight wait, s", "machine's CPU (own)",
    )  # fmt: skip
    base = results.get("sync-colocated")
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for name, outcome in results.items():
        f = outcome.figures
        staleness = sum(int(lag) * share for lag, share in f.staleness.items())
        validity = "" if outcome.cpu <= CPU_LIMIT else " INVALID"
        cells = (
            name,
            f"{outcome.rollouts} + {outcome.train_gpus}",
            f"{f.tokens_per_s:,.0f}",
            f"{f.tokens_per_s / base.figures.tokens_per_s:.2f}" if base else "-",
            f"{f.step_s:.0f}",
            f"{f.idle_actor:.1%}",
            f"{f.idle_rollout:.1%}",
            f"{f.kv_util:.1%}",
            f"{f.recompute_share:.1%}",
            f"{staleness:.2f} ({max(map(int, f.staleness))})",
            f"{f.latency.mean:.0f} / {f.latency.max:.0f}",
            f"{f.weight_wait_s:.1f}",
            f"{outcome.cpu:.0%} ({outcome.own_cpu:.0%}){validity}",
        )
        lines.append(" | ".join(cells))
    return "".join(f"| {line} |\n" for line in lines)


def ablation(results: Mapping[str, Result]) -> str:
    """What streaming and then the delayed update add, in Markdown, the shape of AsyncFlow's Table 1; empty without all three."""
    if not ABLATION.keys() <= results.keys():
        return ""
    lines, base, before = ["", "| schedule | adds | over the barrier | gain |", "| --- | --- | --- | --- |"], 0.0, 0.0
    for name, adds in ABLATION.items():
        speed = results[name].figures.tokens_per_s
        base, before = base or speed, before or speed
        lines.append(f"| {name} | {adds} | {speed / base:.2f} | {speed / before - 1:+.1%} |")
        before = speed
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
