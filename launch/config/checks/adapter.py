"""Checks of `lora.*` against the other settings and the policy."""

from pathlib import Path

from ....comm.errors import SettingError
from ....comm.recipe import LoraSettings, Recipe, RunSettings
from ....relay.checkpoints import CheckpointFolder


def check_lora(recipe: Recipe, folder: Path) -> list[str]:
    """Refuse what an adapter cannot do; `folder` is the policy's. Returns warnings about settings without effect."""
    lora = recipe.lora
    if not lora.rank:
        return (
            [] if lora == LoraSettings() else ["lora.alpha, lora.targets and lora.path have no effect with lora.rank=0"]
        )
    if recipe.trainer.engine != "builtin" or recipe.rollout.engine not in ("builtin", "vllm"):
        raise SettingError(
            "lora.rank: only with trainer.engine=builtin and rollout.engine=builtin or vllm, not with"
            f" {recipe.trainer.engine} and {recipe.rollout.engine}"
        )
    from ....trainer.policy.adapter_files import AdapterBase, start_adapter, start_folder
    from ....trainer.policy.families import family_of
    from ....trainer.policy.lora import adapter_shapes, target_layers
    from ....trainer.policy.model import load_policy

    policy = load_policy(folder, recipe.model.compute_type, weights=False)
    layers = target_layers(policy.model, lora.targets)
    if lora.path:
        shapes = adapter_shapes(layers, lora.rank)
        start = Path(lora.path) if recipe.run.resume == "restart" else start_folder(recipe.run.dir, lora)
        start_adapter(shapes, lora, start, AdapterBase.read(recipe.model.path))
    warnings = _warn_of_start(recipe.run, lora)
    if family_of(policy.config).experts is not None:
        warnings.append(
            f"lora.targets: the experts of model type '{policy.config.model_type}' are fused and take no adapter"
        )
    return warnings


def _warn_of_start(run: RunSettings, lora: LoraSettings) -> list[str]:
    """A warning if a run that continues from a checkpoint began with another adapter than that of `lora.path`."""
    from ....trainer.policy.adapter_files import has_other_start, start_folder

    if run.resume == "restart" or not CheckpointFolder(Path(run.dir)).whole() or not has_other_start(run.dir, lora):
        return []
    start = start_folder(run.dir, lora)
    if not lora.path:
        return [f"lora.path is not set: the run continues with the adapter that it began with, {start}"]
    began = "without an adapter" if start == Path(lora.path) else "with another adapter"
    return [f"lora.path has no effect: the run began {began}, and continues from its checkpoint"]
