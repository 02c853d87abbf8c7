"""What follows from each constant of emulated devices: `headrace` over its peers with the constant halved, doubled, and as in the papers.

    python tests/bench sensitivity RECIPE.yaml [KEY=VALUE ...] [--gpus N] [--fixed-batch GROUPS] [--over NAME ...] [--json FILE]

A constant changes for all schedules alike. The runs are those of `compare` with one setting `lab.*` more, and a finished one is not repeated.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from headrace.comm.errors import SettingError
from headrace.comm.recipe import Recipe
from headrace.launch.command_line import exit_code
from headrace.launch.config.load import read_recipe
from headrace.launch.lab.experiment import Experiment
from headrace.launch.lab.profiles import constants
from headrace.launch.lab.settings import LabSettings, lab_of

from ..harness import Measurement, write_measurements
from .compare import SCHEDULES, Variant, variants

FIXED = ("gpus_per_rollout", "kv_token_bytes", "weights_gb", "trainer_ranks")
"""Constants of the model and of the split, which are not in doubt; `trainer_ranks` has only the papers' value beside its own."""
WAYS = ("halved", "doubled", "papers")


def main(words: Sequence[str]) -> int:
    """Returns the exit code: 2 for a user's mistake, 130 after Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser("python tests/bench sensitivity", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", help="a recipe of emulated devices")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the recipe")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs in all; default: the recipe's")
    parser.add_argument("--fixed-batch", type=int, default=0, metavar="GROUPS", help="groups of a batch")
    parser.add_argument("--over", nargs="+", default=["sync-colocated", "partial"], choices=SCHEDULES, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    arguments = parser.parse_intermixed_args(words)
    return exit_code(lambda: sensitivity(read_recipe(arguments.recipe, arguments.overrides), arguments))


def sensitivity(recipe: Recipe, arguments: argparse.Namespace) -> None:
    """Run, print the table, and write it into `run.dir`. Raises `SettingError`."""
    if not recipe.is_emulated:
        raise SettingError("rollout.engine: the constants are those of emulated devices")
    e = lab_of(recipe.lab)
    num_gpus = arguments.gpus or e.train_gpus + e.gpus_per_rollout * recipe.roles.rollout
    experiment = Experiment(arguments.recipe, arguments.overrides, Path(recipe.run.dir))
    names = ["headrace", *arguments.over]
    sizes = (num_gpus, e.gpus_per_rollout, arguments.fixed_batch)
    entrants = {each.name: each for each in variants(arguments.recipe, names, *sizes, overrides=arguments.overrides)}
    ours = entrants["headrace"]
    e = lab_of(experiment.recipe_with(ours.folder, ours.settings).lab)
    rows: list[Measurement] = []
    lines = [["constant", "value", *(f"{way}, over {peer}" for way in WAYS for peer in arguments.over)]]
    lines.append(["---"] * len(lines[0]))
    for constant in ("", *changing(e)):
        value = getattr(e, constant) if constant else None
        cells = [constant or "as they are", "-" if value is None else f"{value:g}"]
        for way in WAYS:
            speeds = {name: _speed(experiment, entrant, constant, way) for name, entrant in entrants.items()}
            for peer in arguments.over:
                if (speed := speeds["headrace"]) and (base := speeds[peer]):
                    rows.append(Measurement(f"{constant or 'none'}-{way}", peer, speed, "tok/s", speed / base))
                    cells.append(f"{speed / base:.2f}")
                else:
                    cells.append("-")
        lines.append(cells)
        print(f"| {' | '.join(cells)} |", flush=True)
        if arguments.json is not None:
            write_measurements(rows, arguments.json)
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    (experiment.home / "sensitivity.md").write_text(text, encoding="utf-8")
    print(f"\n{text}", end="")


def changing(e: LabSettings) -> Iterator[str]:
    """The constants of a profile that differ from 0 here or in the papers, but for those of the model."""
    papers = constants("papers", e.model, e.gpus_per_rollout, e.train_gpus)
    for name in papers:
        if name == "trainer_ranks" or (name not in FIXED and (getattr(e, name) or papers[name])):
            yield name


def changed(e: LabSettings, constant: str, way: str) -> Mapping[str, object]:
    """The setting that changes a constant so; empty where that is no change or has no meaning."""
    own = getattr(e, constant)
    if way == "papers":
        value = constants("papers", e.model, e.gpus_per_rollout, e.train_gpus)[constant]
        return {} if value == own else {f"lab.{constant}": value}
    if constant in FIXED or not own:
        return {}
    factor = 0.5 if way == "halved" else 2
    return {f"lab.{constant}": type(own)(own * factor)}


def _speed(experiment: Experiment, entrant: Variant, constant: str, way: str) -> float | None:
    """Tokens/s of an entrant with a constant changed, or with all as they are; None where it does not change."""
    own = lab_of(experiment.recipe_with(entrant.folder, entrant.settings).lab)
    change = changed(own, constant, way) if constant else {}
    if constant and not change:
        return None
    folder = f"{entrant.folder}-{constant}-{way}" if constant else entrant.folder
    return experiment.run(folder, {**entrant.settings, **change}).tokens_per_s
