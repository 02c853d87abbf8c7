"""The model that a word of a command line names: of a run or a checkpoint, a folder in Hugging Face format, or a name on the Hub.

| word | model |
|---|---|
| run folder | that of its newest checkpoint, or the one that it exported at its end |
| `RUN/checkpoints/step_N`, `.../latest`, `.../best` | that of this checkpoint |
| folder with `config.json`, or `adapter_config.json` | this one; in a checkpoint it belongs to its run |
| any other word | a name on the Hub, which is not looked up here |
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...comm.errors import SettingError
from ...relay.checkpoints import MANIFEST, CheckpointFolder
from .load import CONFIG_FILE
from .run_folder import SUMMARY_FILE

WHOLE = "hf"
ADAPTER = "adapter"
"""Folders of a checkpoint: the whole policy, and its adapter in peft's format."""
_CONFIG = "config.json"
_ADAPTER_CONFIG = "adapter_config.json"
_POINTERS = ("latest", "best")
_STEP = "step_"


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
    def find(cls, word: str) -> "TrainedModel":
        """The model of a word. Raises `SettingError` for a folder without one."""
        path = Path(word)
        if path.is_file() and path.name in _POINTERS:
            path = path.parent / path.read_text(encoding="utf-8").strip()
        if not path.is_dir():
            return cls(word)
        if (path / _CONFIG).exists() or (path / _ADAPTER_CONFIG).exists():
            step = _step_of(path.parent)
            return cls(word) if step is None else cls(word, path.absolute().parents[2], step)
        if (path / WHOLE / _CONFIG).exists():
            return _of_checkpoint(path)
        if (path / CONFIG_FILE).exists() or (path / "checkpoints").is_dir():
            return _newest(path)
        raise SettingError(
            f"{word} has no model: it is neither the folder of a run ({CONFIG_FILE}), nor of a checkpoint ({WHOLE}/{_CONFIG}),"
            f" nor of a model in Hugging Face format ({_CONFIG})"
        )


def _newest(run_dir: Path) -> TrainedModel:
    """The model of a run's newest checkpoint, or the one that was exported although its checkpoint did not fit on the disk."""
    checkpoints = CheckpointFolder(run_dir)
    steps = set(checkpoints.whole())
    with suppress(OSError, ValueError, AttributeError):
        exported = Path(json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8")).get("export") or "").parent
        step = _step_of(exported)
        steps |= set() if step is None else {step}
    steps = {step for step in steps if (checkpoints.path(step) / WHOLE / _CONFIG).exists()}
    if not steps:
        raise SettingError(f"the run in {run_dir} has no checkpoint yet")
    return TrainedModel(str(checkpoints.path(max(steps)) / WHOLE), run_dir, max(steps))


def _of_checkpoint(folder: Path) -> TrainedModel:
    """The model of a checkpoint's folder; a checkpoint that is still being written has none."""
    if (folder / "dcp").exists() and not (folder / MANIFEST).exists():
        raise SettingError(f"the checkpoint {folder} is not complete: it has no {MANIFEST}")
    step = _step_of(folder)
    run_dir = None if step is None else folder.absolute().parents[1]
    return TrainedModel(str(folder / WHOLE), run_dir, step or 0)


def _step_of(folder: Path) -> int | None:
    """N of a folder `checkpoints/step_N`."""
    name = folder.absolute().name
    number = name.removeprefix(_STEP)
    is_step = name.startswith(_STEP) and number.isdecimal() and folder.absolute().parent.name == "checkpoints"
    return int(number) if is_step else None
