"""The model that a word names: a word of a command line (`headrace eval`, `headrace push`), or `model.path` of a new run.

| word | model |
|---|---|
| run folder, or its `checkpoints` | that of the run's newest complete checkpoint, or the one that it exported at its end |
| `RUN/checkpoints/step_N`, `.../latest`, `.../best` | that of this checkpoint |
| folder with `config.json`, or `adapter_config.json` | this one; in a checkpoint it belongs to its run |
| any other word | as it is: a name on the Hub, which is not looked up here |

A checkpoint has its model in Hugging Face format, with the tokenizer, and of a run with an adapter as merged weights. `model.path` is
resolved once, when the recipe is read: `config.yaml` names the folder of that model, and later checkpoints of the other run change
nothing. Every process reads a recipe, so what only the path of a run needs is imported there.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from msgspec import structs

from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from .run_folder import CONFIG_FILE, JOURNAL_FILE, read_summary

WHOLE = "hf"
ADAPTER = "adapter"
"""Folders of a checkpoint: the whole model, and its adapter in peft's format."""
_CONFIG = "config.json"
_ADAPTER_CONFIG = "adapter_config.json"
_CHECKPOINTS = "checkpoints"
_STEP = re.compile(r"step_(\d+)")
_TEMPLATE = ("chat_template", "chat_template_kwargs")
"""Settings of `data` with which a model reads its prompts, beside what is in its tokenizer."""


class TrainedModel(NamedTuple):
    """A model, and where it comes from."""

    path: str
    """Its folder, or its name on the Hub."""
    run_dir: Path | None = None
    """The folder of the run that trained it."""
    step: int = 0
    """The steps of this run that trained it."""

    @property
    def is_local(self) -> bool:
        """Whether it is a folder here."""
        return Path(self.path).is_dir()

    @property
    def is_adapter(self) -> bool:
        """Whether it is an adapter, without the weights of its base model."""
        folder = Path(self.path)
        return (folder / _ADAPTER_CONFIG).exists() and not (folder / _CONFIG).exists()

    @property
    def recipe_file(self) -> Path | None:
        """The recipe of its run, if that is there."""
        file = None if self.run_dir is None else self.run_dir / CONFIG_FILE
        return file if file is not None and file.exists() else None

    @classmethod
    def of(cls, path: str) -> "TrainedModel":
        """The model at `path`, which belongs to a run if it is called as those in a checkpoint, whether or not it exists."""
        for folder in (_absolute(path), Path(path).resolve()):  # which may be a link to one
            step = _STEP.fullmatch(folder.parent.name)
            if folder.name in (WHOLE, ADAPTER) and step and folder.parent.parent.name == _CHECKPOINTS:
                return cls(path, _written_as(path, folder.parents[2]), int(step[1]))
        return cls(path)

    @property
    def beside(self) -> Path:
        """The folder that its folder is in."""
        return _absolute(self.path).parent

    @classmethod
    def find(cls, word: str, setting: str = "") -> "TrainedModel":
        """The model of a word. Raises `SettingError`, which begins with `setting`, for a folder without one."""
        model = _find(word, setting)
        if model.is_local and not any((Path(model.path) / name).exists() for name in (_CONFIG, _ADAPTER_CONFIG)):
            raise SettingError(
                f"{setting}{word} has no model: it is neither the folder of a run ({CONFIG_FILE}), nor of a checkpoint"
                f" ({WHOLE}/{_CONFIG}), nor of a model in Hugging Face format ({_CONFIG})"
            )
        return model


def from_checkpoint(recipe: Recipe) -> Recipe:
    """The recipe with the model's folder in `model.path` if that names a run or a checkpoint, and with the run's chat template.

    A run that is resumed keeps the checkpoint that it began with. Raises `SettingError`.
    """
    path = recipe.model.path
    model = _find(path, "model.path: ")
    run = model.run_dir
    if run is not None and run.resolve() == Path(recipe.run.dir).resolve():
        raise SettingError(
            f"model.path: {path} is of the run in run.dir itself; set another run.dir, or continue that run with its own"
            " model.path and run.resume=auto"
        )
    if run is None or Path(model.path) == Path(path):
        return recipe
    if recipe.run.resume == "auto" and _absolute(path).parent.name != _CHECKPOINTS:
        began = TrainedModel.of(str(_saved(Path(recipe.run.dir)).get("model", {}).get("path", "")))
        is_same = began.run_dir is not None and began.run_dir.resolve() == run.resolve()
        model = began if is_same else model
    return structs.replace(
        recipe, model=structs.replace(recipe.model, path=model.path), data=_with_template(recipe, _data_of(run))
    )


def start_lines(recipe: Recipe) -> list[str]:
    """Lines for the console about the run that the model of `model.path` is of; none for a model of another origin."""
    model = TrainedModel.of(recipe.model.path)
    run = model.run_dir
    if run is None or not model.is_local:
        return []
    lines = [f"model.path: the run begins with step {model.step} of {run} ({model.path})"]
    if recipe.data.chat_template and _data_of(run).get(_TEMPLATE[0]) == recipe.data.chat_template:
        lines.append(f"data.chat_template: as in {run}")
    if _is_under_way(run):
        lines.append(
            f"warning: model.path: the run in {run} is under way and removes old checkpoints (checkpoint.keep); copy"
            f" {model.path} if this run may need it longer"
        )
    return lines


def _find(word: str, setting: str) -> TrainedModel:
    """The model of a word, which stays as it is if it names neither a run nor a checkpoint.

    setting: the beginning of a message. Raises `SettingError` if a run has no such checkpoint.
    """
    folder = _absolute(word)
    is_checkpoint = folder.parent.name == _CHECKPOINTS
    if is_checkpoint and folder.name in ("latest", "best") and folder.parent.is_dir():
        if not folder.is_file():
            why = "" if folder.name == "latest" else "; checkpoint.best of that run chooses it"
            run = _written_as(word, folder.parents[1])
            raise SettingError(f"{setting}the run in {run} has no {folder.name} checkpoint{why}")
        folder = folder.with_name(folder.read_text(encoding="utf-8").strip())
    if not word or (folder / _CONFIG).exists() or (folder / _ADAPTER_CONFIG).exists():
        return TrainedModel.of(word)
    if is_checkpoint and (step := _STEP.fullmatch(folder.name)):
        return _checkpoint(word, folder.parents[1], int(step[1]), setting)
    if (folder / WHOLE / _CONFIG).exists():  # a copy of a checkpoint
        return TrainedModel(str(Path(word) / WHOLE))
    run = folder.parent if folder.name == _CHECKPOINTS else folder
    if any((run / name).exists() for name in (_CHECKPOINTS, JOURNAL_FILE, CONFIG_FILE)):
        return _checkpoint(word, run, None, setting)
    return TrainedModel.of(word)


def _checkpoint(word: str, run: Path, step: int | None, setting: str) -> TrainedModel:
    """The model of a complete checkpoint of a run, by default of the newest one. Raises `SettingError` without one."""
    from ...relay.checkpoints import CheckpointFolder

    checkpoints = CheckpointFolder(run)
    shown = _written_as(word, run)
    steps = _steps(run)
    if step is None and not steps:
        raise SettingError(
            f"{setting}the run in {shown} has no complete checkpoint with a model yet; a run writes one every 30 minutes and at its end,"
            " or as checkpoint.every says"
        )
    number = steps[-1] if step is None else step
    folder = checkpoints.path(number) / WHOLE
    # A model without the trainer's state is complete if the user says so.
    if number in checkpoints.incomplete() or not (folder / _CONFIG).exists():
        others = f"it has {', '.join(f'step_{other}' for other in steps)}" if steps else "it has none"
        raise SettingError(
            f"{setting}the run in {shown} has no complete checkpoint step_{number} with a model; {others}"
        )
    return TrainedModel(str(_written_as(word, folder)), shown, number)


def _steps(run: Path) -> list[int]:
    """The steps of the run's complete checkpoints with a model, in order.

    At its end a run may have written the model alone, and its summary says so: otherwise the model may be in the writing.
    """
    from ...relay.checkpoints import CheckpointFolder

    checkpoints = CheckpointFolder(run)
    exported = TrainedModel.of(str((read_summary(run) or {}).get("export") or ""))
    steps = {*checkpoints.whole(), exported.step}
    return sorted(step for step in steps if (checkpoints.path(step) / WHOLE / _CONFIG).exists())


def _absolute(word: str) -> Path:
    """The path of a word; the names in it are those of the user, without `..`."""
    path = Path(word).absolute()
    return path.resolve() if ".." in path.parts else path


def _written_as(word: str, path: Path) -> Path:
    """The path, relative to the present folder if the word is relative and the path is below that folder."""
    here = Path.cwd()
    return path.relative_to(here) if not Path(word).is_absolute() and path.is_relative_to(here) else path


def _with_template(recipe: Recipe, before: dict[str, Any]) -> Any:
    """The recipe's data; without settings of the chat template of its own it has those of the other run."""
    data = recipe.data
    if any(getattr(data, name) for name in _TEMPLATE):
        return data
    return structs.replace(data, **{name: before[name] for name in _TEMPLATE if before.get(name)})


def _is_under_way(run: Path) -> bool:
    from ...relay.journal.journal import Journal

    journal = run / JOURNAL_FILE
    return journal.exists() and Journal.is_in_use(journal)


def _data_of(run: Path) -> dict[str, Any]:
    return _saved(run).get("data", {})


def _saved(run: Path) -> dict[str, Any]:
    """The saved recipe of a run, empty without one: a run of another version of the program has other settings."""
    try:
        saved = yaml.safe_load((run / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return saved if isinstance(saved, dict) else {}
