"""`model.path=RUN`: a new run that begins with the policy of another run, at its newest checkpoint or at a given one.

A checkpoint has its policy in Hugging Face form, with the tokenizer, and of a run with an adapter as merged weights. The path is
resolved once, when the recipe is read: `config.yaml` names the folder of that policy, and later checkpoints of the other run change
nothing. Every process reads a recipe, so what only the path of a run needs is imported there.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from msgspec import structs

from ...comm.errors import SettingError
from ...comm.recipe import Recipe

_CHECKPOINTS = "checkpoints"
_POLICY = "hf"
"""The folder of a checkpoint with the policy."""
_STEP = re.compile(r"step_(\d+)")
_TEMPLATE = ("chat_template", "chat_template_kwargs")
"""Settings of `data` with which a policy reads its prompts, beside what is in its tokenizer."""


class RunCheckpoint(NamedTuple):
    """The policy of the run in the folder `run`, after `step` steps."""

    run: Path
    step: int

    @property
    def policy(self) -> Path:
        """Its folder, in Hugging Face format."""
        return self.run / _CHECKPOINTS / f"step_{self.step}" / _POLICY

    @staticmethod
    def of(path: str) -> "RunCheckpoint | None":
        """The checkpoint whose `policy` is `path`; None for another folder."""
        folder = Path(path)
        step = _STEP.fullmatch(folder.parent.name)
        if folder.name != _POLICY or step is None or folder.parent.parent.name != _CHECKPOINTS:
            return None
        return RunCheckpoint(folder.parents[2], int(step[1]))

    @staticmethod
    def find(path: str) -> "RunCheckpoint | None":
        """The checkpoint that `path` names: a run folder is its newest, `checkpoints/step_N`, `latest` and `best` are that one.

        None if `path` is not of a run. Raises `SettingError` if the run has no such checkpoint.
        """
        folder = Path(path)
        if folder.parent.name == _CHECKPOINTS and folder.is_file() and folder.name in ("latest", "best"):
            folder = folder.with_name(folder.read_text(encoding="utf-8").strip())
        if folder.parent.name == _CHECKPOINTS and (step := _STEP.fullmatch(folder.name)):
            return _usable(RunCheckpoint(folder.parents[1], int(step[1])))
        run = folder.parent if folder.name == _CHECKPOINTS else folder
        is_run = (run / _CHECKPOINTS).is_dir() or (run / "journal.jsonl").exists()
        if not path or not is_run or (folder / "config.json").exists():
            return None
        steps = _steps(run)
        if not steps:
            raise SettingError(f"model.path: the run in {run} has no complete checkpoint with a model yet")
        return RunCheckpoint(run, steps[-1])

    def lines(self, recipe: Recipe) -> list[str]:
        """For the console: what a run of the recipe takes over, and a warning if it may vanish."""
        lines = [f"model.path: the run begins with step {self.step} of {self.run} ({self.policy})"]
        if recipe.data.chat_template and _data_of(self.run).get(_TEMPLATE[0]) == recipe.data.chat_template:
            lines.append(f"data.chat_template: as in {self.run}")
        if _is_under_way(self.run):
            lines.append(
                f"warning: model.path: the run in {self.run} is under way and removes old checkpoints (checkpoint.keep); copy"
                f" {self.policy} if this run may need it longer"
            )
        return lines


def from_checkpoint(recipe: Recipe) -> Recipe:
    """The recipe with the policy's folder in `model.path` if that names a run or a checkpoint, and with the run's chat template.

    A run that is resumed keeps the checkpoint that it began with. Raises `SettingError`.
    """
    path = recipe.model.path
    found = RunCheckpoint.find(path)
    source = found or RunCheckpoint.of(path)
    if source is not None and source.run.resolve() == Path(recipe.run.dir).resolve() and recipe.run.mode == "train":
        raise SettingError(
            f"model.path: {path} is of the run in run.dir itself; set another run.dir, or continue that run with its own"
            " model.path and run.resume=auto"
        )
    if found is None:
        return recipe
    if recipe.run.resume == "auto" and Path(path).parent.name != _CHECKPOINTS:
        began = RunCheckpoint.of(str(_saved(Path(recipe.run.dir)).get("model", {}).get("path", "")))
        found = began if began and began.run.resolve() == found.run.resolve() else found
    return structs.replace(
        recipe,
        model=structs.replace(recipe.model, path=str(found.policy)),
        data=_with_template(recipe, _data_of(found.run)),
    )


def start_lines(recipe: Recipe) -> list[str]:
    """Lines for the console about the run that the policy of `model.path` is of; none for a policy of another origin."""
    source = RunCheckpoint.of(recipe.model.path)
    return source.lines(recipe) if source is not None and source.policy.is_dir() else []


def _with_template(recipe: Recipe, before: dict[str, Any]) -> Any:
    """The recipe's data; without settings of the chat template of its own it has those of the other run."""
    data = recipe.data
    if any(getattr(data, name) for name in _TEMPLATE):
        return data
    return structs.replace(data, **{name: before[name] for name in _TEMPLATE if before.get(name)})


def _usable(found: RunCheckpoint) -> RunCheckpoint:
    """Raises `SettingError` for a checkpoint that was not written to its end."""
    if found.step in (steps := _steps(found.run)):
        return found
    others = f"it has {', '.join(f'step_{step}' for step in steps)}" if steps else "it has none"
    raise SettingError(
        f"model.path: the run in {found.run} has no complete checkpoint step_{found.step} with a model; {others}"
    )


def _steps(run: Path) -> list[int]:
    """The steps of the run's complete checkpoints with a policy, in order.

    At its end a run may have written the policy alone.
    """
    from ...relay.checkpoints import CheckpointFolder

    folder = CheckpointFolder(run)
    exports = map(RunCheckpoint.of, map(str, folder.root.glob(f"step_*/{_POLICY}")))
    steps = {each.step for each in exports if each is not None and (each.policy / "config.json").exists()}
    return sorted(steps - set(folder.incomplete()))


def _is_under_way(run: Path) -> bool:
    from ...relay.journal.journal import Journal

    journal = run / "journal.jsonl"
    return journal.exists() and Journal.is_in_use(journal)


def _data_of(run: Path) -> dict[str, Any]:
    return _saved(run).get("data", {})


def _saved(run: Path) -> dict[str, Any]:
    """The saved recipe of a run, empty without one: a run of another version of the program has other settings."""
    try:
        saved = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return saved if isinstance(saved, dict) else {}
