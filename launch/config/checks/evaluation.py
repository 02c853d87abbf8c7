"""Checks of `eval.*`: the settings fit together, and every prompt can be read."""

from ....comm.errors import SettingError
from ....comm.recipe import CheckpointSettings, DataSettings, EvalSettings, Recipe
from ....comm.recipe.generation import LEAST_TEMPERATURE
from ....relay.journal.evaluation_metrics import pass_sizes
from ....relay.queue.evaluation_prompts import evaluation_data, evaluation_names
from .data import CheckedData, check_data


def check_evaluation(recipe: Recipe) -> list[tuple[DataSettings, CheckedData]]:
    """The prompts of each file of `eval.path`, with the settings that read it. Raises `SettingError`."""
    settings = recipe.eval
    _check_best(recipe.checkpoint, settings)
    if not settings.paths:
        return []
    if 0 < settings.temperature < LEAST_TEMPERATURE:
        raise SettingError(f"eval.temperature: set 0 (greedy) or at least {LEAST_TEMPERATURE:g}")
    if settings.samples > 1 and settings.temperature == 0:
        raise SettingError(
            f"eval.samples={settings.samples}: greedy responses to a prompt are all the same; set eval.temperature above 0"
        )
    try:
        data = evaluation_data(recipe.data, settings).values()
        return [(each, check_data(each, settings.max_prompts)) for each in data]
    except SettingError as error:
        raise SettingError(str(error).replace("data.path", "eval.path")) from error


def check_best_of_steps(checkpoint: CheckpointSettings) -> list[str]:
    """A warning that a metric of steps chooses among few checkpoints; those of evaluations have a checkpoint each."""
    best = checkpoint.best
    if not best or checkpoint.is_best_evaluated or checkpoint.every is not None:
        return []
    chosen = f"checkpoint.best={best} chooses among the checkpoints alone"
    return [
        f"{chosen}; with checkpoint.every=null there is one every 30 minutes and at the end, so set checkpoint.every"
    ]


def checkpoint_lines(recipe: Recipe) -> list[str]:
    """A line for the console about checkpoints that a run writes for `checkpoint.best` although `checkpoint.every` is null."""
    every = recipe.checkpoint_steps
    if recipe.checkpoint.every is not None or not every:
        return []
    return [f"a checkpoint every {every} steps, for checkpoint.best={recipe.checkpoint.best} (checkpoint.every=null)"]


def _check_best(checkpoint: CheckpointSettings, settings: EvalSettings) -> None:
    """A checkpoint can be scored by an evaluation: each has its version evaluated, and the metric exists."""
    best = checkpoint.best
    every = checkpoint.every
    if best and every == 0:
        raise SettingError(f"checkpoint.best={best}: there is nothing to choose from; set checkpoint.every above 0")
    if not checkpoint.is_best_evaluated:
        return
    if not settings.paths:
        raise SettingError(f"checkpoint.best={best}: nothing is evaluated; set eval.path, and eval.every above 0")
    means = [f"avg@{settings.samples}", *(f"pass@{k}" for k in pass_sizes(settings.samples))]
    known = [f"eval/{name}/{mean}" for name in evaluation_names(settings) for mean in means]
    if best not in known:
        raise SettingError(f"checkpoint.best={best}: the metrics of an evaluation are {', '.join(known)}")
    if every and every % settings.every:
        raise SettingError(
            f"checkpoint.best={best}: with eval.every={settings.every}, some checkpoints (every {every} steps) have no score;"
            " set checkpoint.every to a multiple of eval.every"
        )
