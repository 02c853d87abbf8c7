"""The model that a command's words name, and its settings: those of its run or recipe, with the words' own."""

from collections.abc import Sequence

from msgspec.structs import replace

from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from .arguments import is_setting
from .load import read_recipe
from .run_checkpoints import WHOLE, TrainedModel

_RECIPES = (".yaml", ".yml")
"""Endings of a recipe's name."""


def read_named(words: Sequence[str], usual: Sequence[str] = ()) -> tuple[TrainedModel, Recipe]:
    """The model of a command line, and its recipe with the `KEY=VALUE` words, whose `model.path` is this model.

    A recipe's name stands for the model that its run begins with. usual: settings of a model without a run or recipe, before those
    of the words. Raises `SettingError`, also for an adapter alone and for emulated devices.
    """
    overrides = [word for word in words if is_setting(word)]
    names = [word for word in words if word not in overrides]
    if len(names) != 1:
        raise SettingError(
            f"name one model: a run folder, a checkpoint, a model's folder or its name on the Hub; not {names}"
        )
    (word,) = names
    if word.endswith(_RECIPES):
        recipe = read_recipe(word, overrides)
        model = TrainedModel.find(recipe.model.path)
    elif any(override.startswith("model.path=") for override in overrides):
        raise SettingError(f"model.path: {word} is the model; leave this out")
    else:
        model = TrainedModel.find(word)
        recipe = read_recipe(model.recipe_file, overrides if model.recipe_file else [*usual, *overrides])
    if model.is_adapter:
        whole = model.beside / WHOLE
        way = f"name {whole}" if whole.is_dir() else "merge it first (merge_and_unload in peft)"
        raise SettingError(f"{model.path} is an adapter without its base model; {way}")
    if recipe.is_emulated:
        raise SettingError("rollout.engine: emulated devices have no policy")
    return model, replace(recipe, model=replace(recipe.model, path=model.path))
