"""Saved weights on the disk: states of training and weights for samplers, by the names that clients give.

    DIR/RUN_ID/run.json                              what is trained: rank, layers, the client's metadata
    DIR/RUN_ID/weights/NAME/{dcp,saved.json}         a state: weights, moments and the number of updates
    DIR/RUN_ID/sampler_weights/NAME/{weights.safetensors,saved.json}

`saved.json` is written last, so a folder without it is incomplete. A client knows them as `tinker://RUN_ID/weights/NAME`.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ....comm.disk import folder_bytes
from ....comm.errors import SettingError
from ....relay.checkpoints import sync_folder, write_durably

STATES = "weights"
SAMPLERS = "sampler_weights"
KINDS = {STATES: "training", SAMPLERS: "sampler"}
"""Folders of saved weights, with the API's names of what is in them."""
_SCHEME = "tinker://"
_NAME = re.compile(r"[\w.\-]{1,200}", re.ASCII)
_RUN_ID = re.compile(r"[\w\-]{1,80}:train:\d{1,9}", re.ASCII)
_SAVED = "saved.json"
_RUN = "run.json"


class TrainingRun(msgspec.Struct, frozen=True):
    """What a model is that a client trains; `rank` 0 trains all weights."""

    run_id: str
    base_model: str
    rank: int
    train_attn: bool
    train_mlp: bool
    seed: int
    since: float
    user_metadata: dict[str, str] | None = None
    settings: str = ""
    """A digest of the initial weights and of the server's settings."""


class Saved(msgspec.Struct, frozen=True):
    """Saved weights; times are in seconds since 1970. request: the number of the one that has saved them."""

    time: float
    num_bytes: int
    num_updates: int
    expires_at: float | None = None
    user_metadata: dict[str, str] | None = None
    request: int = 0


class SavedPath(NamedTuple):
    """The name of saved weights."""

    run_id: str
    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> "SavedPath":
        """Of `tinker://RUN_ID/KIND/NAME`. Raises `SettingError`."""
        parts = text.removeprefix(_SCHEME).split("/")
        if not text.startswith(_SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise SettingError(
                f"path: {text!r} is not tinker://RUN_ID/weights/NAME or tinker://RUN_ID/sampler_weights/NAME"
            )
        return cls(*parts)

    def __str__(self) -> str:
        return f"{_SCHEME}{self.run_id}/{self.kind}/{self.name}"


class SavedWeights:
    """The folder of all that clients have saved."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def begin(self, run: TrainingRun) -> None:
        """Note what is trained. Raises `OSError`."""
        folder = self._of_run(run.run_id)
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / _RUN, msgspec.json.encode(run))
        sync_folder(self.root)

    def runs(self) -> list[TrainingRun]:
        """All that was trained, the oldest first."""
        found = [run for path in self.root.glob(f"*/{_RUN}") if (run := _read(path, TrainingRun)) is not None]
        return sorted(found, key=lambda run: run.since)

    def run(self, run_id: str) -> TrainingRun:
        """Raises `SettingError` for one that is not there."""
        run = self.find_run(run_id)
        if run is None:
            raise SettingError(f"training run {run_id!r} is not on this server")
        return run

    def find_run(self, run_id: str) -> TrainingRun | None:
        """A training run; None for one that is not there. Raises `SettingError` for an id of another form."""
        return _read(self._of_run(run_id) / _RUN, TrainingRun)

    def check_name(self, path: SavedPath, *, overwrite: bool = False, request: int = 0) -> None:
        """Raise `SettingError` for a name that is no file's name, or that another request than this one has taken."""
        if not _NAME.fullmatch(path.name) or not path.name.strip("."):
            raise SettingError(f"path: {path.name!r} is not a name of letters, digits, '_', '-' and '.'")
        found = None if overwrite else self.find(path)
        if found is not None and not 0 < found.request == request:
            raise SettingError(f"path: {path} exists")

    def write(
        self,
        path: SavedPath,
        write: Callable[[Path], None],
        num_updates: int,
        ttl_s: int | None,
        metadata: Any,
        request: int = 0,
    ) -> None:
        """Save what `write` writes into a folder; an earlier one of this name goes. It is on the disk then. Raises `OSError`."""
        self.remove_expired()
        folder = self._folder(path)
        unfinished = folder.with_name(f".{path.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            write(unfinished)
            now = time.time()
            expires = None if ttl_s is None else now + ttl_s
            saved = Saved(now, folder_bytes(unfinished), num_updates, expires, metadata, request)
            (unfinished / _SAVED).write_bytes(msgspec.json.encode(saved))
            for each in (*unfinished.rglob("*"), unfinished):
                _sync(each)
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
            for above in (folder.parent, folder.parent.parent):
                sync_folder(above)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def find(self, path: SavedPath) -> Saved | None:
        """What is saved under a name; None if nothing is, or not any more."""
        if not _NAME.fullmatch(path.name):
            return None
        saved = _read(self._folder(path) / _SAVED, Saved)
        return None if saved is None or _is_expired(saved) else saved

    def folder(self, path: SavedPath) -> Path:
        """The folder of saved weights. Raises `SettingError` where there are none."""
        if self.find(path) is None:
            raise SettingError(f"path: there is no {path} on this server")
        return self._folder(path)

    def all(self, run_id: str) -> Iterator[tuple[SavedPath, Saved]]:
        """What a training run has saved, the newest first."""
        found: list[tuple[SavedPath, Saved]] = []
        for kind in KINDS:
            for file in (self._of_run(run_id) / kind).glob(f"*/{_SAVED}"):
                path = SavedPath(run_id, kind, file.parent.name)
                saved = self.find(path)
                found += [] if saved is None or path.name.startswith(".") else [(path, saved)]
        yield from sorted(found, key=lambda item: -item[1].time)

    def remove(self, path: SavedPath) -> None:
        """Raises `SettingError` where there is nothing to remove."""
        shutil.rmtree(self.folder(path))

    def remove_expired(self) -> None:
        """Remove what clients wanted for a time that is over."""
        for file in self.root.glob(f"*/*/*/{_SAVED}"):
            saved = _read(file, Saved)
            if saved is not None and _is_expired(saved):
                shutil.rmtree(file.parent)

    def _folder(self, path: SavedPath) -> Path:
        return self._of_run(path.run_id) / path.kind / path.name

    def _of_run(self, run_id: str) -> Path:
        """The folder of a training run. Raises `SettingError` for an id that this server has not given."""
        if not _RUN_ID.fullmatch(run_id):
            raise SettingError(f"training run {run_id!r} is not on this server")
        return self.root / run_id


def make_folder(path: Path) -> None:
    """Make the folder of saved weights. Raises `SettingError` where it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"--dir={path}: {error.strerror}") from error


def _sync(path: Path) -> None:
    """Have a file or a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_expired(saved: Saved) -> bool:
    return saved.expires_at is not None and saved.expires_at < time.time()


def _read(file: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None
