"""`headrace replay`: trains steps of a run again, computes what other losses would have done with them, and packs one for a report."""

import argparse
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...comm.errors import SettingError
from ..command_line import CommandParser, exit_code

if TYPE_CHECKING:
    from ...comm.recipe import Recipe
    from ...trainer.replay.replay import Variant

_PAGE = """\
Trains steps of a run again from their saved rows, and compares losses and gradient norms with metrics.jsonl.

usage: headrace replay RUN [KEY=VALUE ...] [--steps N|FIRST-LAST] [--with SETTINGS]...
       headrace replay RUN --steps N --pack FILE [--without-weights]
       headrace replay FILE [KEY=VALUE ...] [--checkpoint FOLDER] [--with SETTINGS]...

RUN is the folder of a run. Steps whose rows are there can be trained again: of all steps with run.save_rows=all, else of the last
ones. KEY=VALUE says where the model and your own functions are now, and how this machine computes: model.path, model.dtype,
lora.path, trainer.*, comm.*.

  --steps N|FIRST-LAST
              the steps, counted from 1 as on the console. The replay begins with the newest checkpoint before them, or with the
              initial weights. By default all steps that can be trained again
  --with SETTINGS
              also compute the gradient of other settings of algorithm.* on the same rows and weights; the run's own gradient is
              the one that is applied. It may be given several times:
                  headrace replay runs/mine --steps 135-145 --with "algorithm.loss=gspo algorithm.proximal=rollout"
  --pack FILE
              write the step into a file, with its rows, the settings that it needs and the weights before it, so that it can be
              trained again elsewhere. It has the prompts and responses of the step, and no addresses or secrets
  --without-weights
              the file has only the digest of the weights. The step must begin with a checkpoint, which the receiver must have
  --checkpoint FOLDER
              with such a file, the checkpoint: RUN/checkpoints/step_N

Exit codes: 0 if all numbers are equal, 1 if some differ, 2 for a mistake, 130 after Ctrl-C.
"""
_OF_THE_MACHINE = ("model.path", "model.dtype", "lora.path")
"""Settings that a replay may replace, beside those of the sections `trainer` and `comm`."""
_OWN_FUNCTIONS = ("advantage", "loss")
"""Settings of `algorithm` that may name a function of the user's."""
_OF_ADVANTAGES = ("advantage", "scale_rewards", "gamma", "lam", "overlong_buffer", "overlong_penalty")
"""Settings of `algorithm` that act on advantages alone."""


def main(words: Sequence[str]) -> int:
    """Replay what the words name; returns the exit code."""
    parser = CommandParser("replay", page=lambda: _PAGE)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--steps")
    parser.add_argument("--with", dest="variants", action="append", default=[])
    parser.add_argument("--pack")
    parser.add_argument("--without-weights", action="store_true")
    parser.add_argument("--checkpoint", default="")
    return exit_code(lambda: _replay(parser.parse_intermixed_args(words)))


def _replay(given: argparse.Namespace) -> int:
    from ...comm.environment import sleeping_threads
    from ..config.arguments import is_setting

    overrides = [word for word in given.words if is_setting(word)]
    names = [word for word in given.words if word not in overrides]
    if len(names) != 1:
        raise SettingError(
            f"name one folder of a run, or one pack, not {' '.join(names) or 'none'}; --help has the options"
        )
    source = Path(names[0])
    with sleeping_threads():
        return _replay_pack(source, overrides, given) if source.is_file() else _replay_run(source, overrides, given)


def _replay_run(run_dir: Path, overrides: Sequence[str], given: argparse.Namespace) -> int:
    if given.checkpoint:
        raise SettingError("--checkpoint: only with a pack; a replay of a run chooses the newest one before --steps")
    if given.without_weights and given.pack is None:
        raise SettingError("--without-weights: only with --pack")
    from headrace import __version__

    from ...trainer.replay.replay import NewPack, replay_steps

    steps = None if given.steps is None else read_steps(given.steps)
    recipe, warnings = read_run(run_dir, overrides)
    variants = _variants(recipe, given.variants, warnings)
    pack = None
    if given.pack is not None:
        pack = NewPack(Path(given.pack), __version__, has_weights=not given.without_weights)
    return 1 if replay_steps(recipe, steps, variants, pack) else 0


def _replay_pack(path: Path, overrides: Sequence[str], given: argparse.Namespace) -> int:
    for name in ("steps", "pack", "without_weights"):
        if getattr(given, name):
            raise SettingError(f"--{name.replace('_', '-')}: {path} is a pack, which has one step; leave it out")
    from ...trainer.replay.pack import opened_pack
    from ...trainer.replay.replay import replay_pack
    from ..config.load import changed_recipe

    with opened_pack(path) as (pack, folder):
        packed = pack.recipe(folder)
        check_overrides(packed, overrides)
        recipe = changed_recipe(packed, overrides)
        _check_named(recipe, {word.partition("=")[0] for word in overrides})
        variants = _variants(recipe, given.variants, _other_type(recipe, packed))
        return 1 if replay_pack(recipe, pack, folder, given.checkpoint, variants) else 0


def _check_named(recipe: "Recipe", named: Collection[str]) -> None:
    """Raise `SettingError` unless the receiver of a pack named the files and folders of the sender that its step needs."""
    for name in _OWN_FUNCTIONS:
        if ":" in (function := getattr(recipe.algorithm, name)) and f"algorithm.{name}" not in named:
            raise SettingError(
                f"algorithm.{name}: the step was trained with {function}, which is not in the pack; name the file on this machine:"
                f" algorithm.{name}=FILE.py:FUNCTION"
            )
    for setting, path in (("model.path", recipe.model.path), ("lora.path", recipe.lora.path)):
        if path and "/" not in path and setting not in named:  # an id of the Hub has a /
            raise SettingError(
                f"{setting}: the run began with its sender's folder {path}, which is not in the pack; name the folder on this machine:"
                f" {setting}=FOLDER"
            )


def read_steps(text: str) -> tuple[int, int]:
    """The first and the last step of `N` or `FIRST-LAST`. Raises `SettingError`."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None:
        raise SettingError(f"--steps {text}: write one step, such as 140, or the first and the last, such as 135-145")
    return int(found[1]), int(found[2] or found[1])


def read_run(run_dir: Path, overrides: Sequence[str]) -> "tuple[Recipe, list[str]]":
    """The recipe of a run for its replay on this machine, and warnings. Raises `SettingError`."""
    from ..config.device_defaults import with_device_defaults
    from ..config.gpus import Gpus
    from ..config.load import changed_recipe, read_recipe
    from ..config.run_folder import CONFIG_FILE

    file = run_dir / CONFIG_FILE
    if not file.is_file():
        raise SettingError(f"{run_dir} is neither the folder of a run, which has a {CONFIG_FILE}, nor a pack")
    saved = with_device_defaults(read_recipe(file, [f"run.dir={run_dir}"]), Gpus.of_this_host())
    check_overrides(saved, overrides)
    recipe = changed_recipe(saved, overrides)
    return recipe, _other_type(recipe, saved)


def _other_type(recipe: "Recipe", saved: "Recipe") -> list[str]:
    from ..config.device_defaults import other_type

    before = saved.model.compute_type
    return [other_type(recipe, before)] if recipe.model.compute_type != before else []


def check_overrides(saved: "Recipe", overrides: Iterable[str]) -> None:
    """Raise `SettingError` for a setting with which other steps would be trained than those of the run."""
    moved = [f"algorithm.{name}" for name in _OWN_FUNCTIONS if ":" in getattr(saved.algorithm, name)]
    for word in overrides:
        name, _, value = word.partition("=")
        if name in _OF_THE_MACHINE or name.startswith(("trainer.", "comm.")) or (name in moved and ":" in value):
            continue
        if name.startswith("algorithm."):
            raise SettingError(
                f'{word}: a replay trains the steps as the run did; to compare with it, write --with "{word}"'
            )
        others = ", ".join((*_OF_THE_MACHINE, "trainer.*", "comm.*"))
        raise SettingError(f"{word}: a replay trains the steps as the run did; only {others} may be other ones here")


def _variants(recipe: "Recipe", words: Sequence[str], warnings: Sequence[str]) -> "list[Variant]":
    """The variants, after their warnings and those before are printed."""
    from ..processes.child import print_message

    found = [read_variant(recipe, each) for each in words]
    for warning in (*warnings, *(line for variant in found for line in variant_warnings(recipe, variant))):
        print_message(f"warning: {warning.removeprefix('warning: ')}")
    return found


def read_variant(recipe: "Recipe", words: str) -> "Variant":
    """The variant that the words of a `--with` describe. Raises `SettingError`."""
    from ...trainer.replay.replay import Variant
    from ..config.checks.recipe import check_function
    from ..config.load import changed_recipe

    option = f'--with "{words}"'
    try:
        settings = shlex.split(words)
    except ValueError as error:
        raise SettingError(f"{option}: {error}") from error
    for name in (word.partition("=")[0] for word in settings if "=" in word):
        if not name.startswith("algorithm."):
            raise SettingError(
                f"{option}: {name} cannot be another one: the run drew and rewarded the rows, and its updates made the weights. Only"
                " algorithm.* may differ, which acts on the gradient of rows that are there"
            )
    try:
        algorithm = changed_recipe(recipe, settings).algorithm
        for name in _OWN_FUNCTIONS:
            if ":" in (function := getattr(algorithm, name)):
                check_function(f"algorithm.{name}", function)
    except SettingError as error:
        raise SettingError(f"{option}: {error}") from error
    return Variant(words, algorithm)


def variant_warnings(recipe: "Recipe", variant: "Variant") -> Iterator[str]:
    """Warnings about settings of a variant that change nothing. Raises `SettingError` for settings that contradict each other."""
    from msgspec.structs import replace

    from ...comm.recipe import CriticSettings
    from ..config.checks.algorithm import check_algorithm

    option = f'--with "{variant.words}"'
    own = replace(recipe, critic=CriticSettings())  # the variant leaves the critic as it is
    try:
        found = check_algorithm(replace(own, algorithm=variant.algorithm))
    except SettingError as error:
        raise SettingError(f"{option}: {error}") from error
    known = check_algorithm(own)
    yield from (f"{option}: {warning}" for warning in found if warning not in known)
    changed = [name for name in _OF_ADVANTAGES if getattr(variant.algorithm, name) != getattr(recipe.algorithm, name)]
    if changed and (tasks := [task.name for task in recipe.queue.tasks if "advantages" in task.yields]):
        yield f"{option}: algorithm.{changed[0]} has no effect, since the rows have the advantages of task {tasks[0]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
