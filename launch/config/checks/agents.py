"""Checks of a run whose trajectories are those of agents (`environment.path=serve`)."""

from ....comm.errors import SettingError
from ....comm.recipe import Recipe


def check_agents(recipe: Recipe) -> None:
    """Nothing is set that agents could not follow. Raises `SettingError`, which names the setting."""
    if not recipe.rollout.serve:
        raise SettingError(
            "environment.path=serve: agents use the run over HTTP, and rollout.serve is not set; rollout.serve=8000 listens"
            " on port 8000"
        )
    if recipe.environment.tools:
        raise SettingError("environment.tools: with environment.path=serve the agents have the tools; leave this out")
    if recipe.environment.workers > 1:
        raise SettingError("environment.workers: with environment.path=serve no environment is hosted; leave this out")
    if recipe.eval.path:
        raise SettingError(
            "eval.path: no agent claims the prompts of an evaluation with environment.path=serve; leave this out, and let an"
            " agent measure at the address of rollout.serve"
        )
    if recipe.algorithm.overlong_buffer:
        raise SettingError(
            "algorithm.overlong_buffer: with environment.path=serve a row may have several branches, which together are no long"
            " response; leave this out"
        )
    if recipe.reward.batch == "group":
        raise SettingError(
            "reward.batch=group: with environment.path=serve the samples of a group end whenever their agents do; take sample"
        )
