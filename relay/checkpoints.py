"""The folder `checkpoints/` of a run: which checkpoints are complete, and from which a run resumes.

    step_N/{dcp,hf}/...      the trainer's state after N steps, and its policy in Hugging Face form
    step_N/adapter/...       with `lora.rank`, the adapter in peft's form
    step_N/manifest.json     size and digest of each of these files; written last, so a folder without it is incomplete
    latest                   names the newest checkpoint that the journal knows
    best                     names the one with the highest score, with `checkpoint.best`

After a power cut, every name refers to complete data: files and folders are synced before the manifest is written, the manifest
before the journal has the checkpoint, and the journal before `latest` names it.
"""

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from ..comm.disk import make_folders
from ..comm.errors import SettingError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_BLOCK_BYTES = 1 << 24


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a checkpoint: its size in bytes and the xxh3 of its bytes, in hexadecimal digits."""

    num_bytes: int
    digest: str


class Manifest(msgspec.Struct, frozen=True):
    """The content of a whole checkpoint; `score` is the value of `checkpoint.best` after its last step."""

    step: int
    files: dict[str, FileEntry]
    score: float | None = None


class CheckpointFolder:
    """The checkpoints of one run, or what else it saves with each (`name`); every process that shares the run folder may read it."""

    def __init__(self, run_dir: Path, name: str = "checkpoints") -> None:
        self.root = run_dir / name

    def path(self, step: int) -> Path:
        return self.root / f"step_{step}"

    def whole(self) -> dict[int, Manifest]:
        """Manifests of the checkpoints that were written to their end, by step. Their digests are not checked."""
        found = {number_of(path.parent.name): _read_manifest(path) for path in self.root.glob(f"step_*/{MANIFEST}")}
        return {step: manifest for step, manifest in sorted(found.items()) if manifest and manifest.step == step}

    def incomplete(self) -> list[int]:
        """Steps of the checkpoints that were begun and not written to their end; an export alone is not one."""
        whole = self.whole()
        return [step for path in self.root.glob("step_*/dcp") if (step := number_of(path.parent.name)) not in whole]

    def latest(self) -> int | None:
        """The step that `latest` names, None without the file. Raises `SettingError` if it names none."""
        pointer = self.root / "latest"
        if not pointer.exists():
            return None
        step = number_of(pointer.read_text(encoding="utf-8").strip())
        if step < 0:
            raise SettingError(f"run.resume: {pointer} does not name a checkpoint")
        return step

    def newest_usable(self) -> int | None:
        """The newest whole checkpoint up to the one that `latest` names; None without any. It reads every byte of those it tries."""
        latest = self.latest()
        for step in sorted((step for step in self.whole() if latest is not None and step <= latest), reverse=True):
            if not (problem := self.problem(step)):
                return step
            log.warning("%s %s; it is skipped", self.path(step).name, problem)
        return None

    def set_latest(self, step: int) -> None:
        """Make `latest` name a checkpoint."""
        make_folders(self.root.parent, self.root.name)
        write_durably(self.root / "latest", self.path(step).name.encode())

    def clear_latest(self) -> None:
        """Make `latest` name no checkpoint."""
        (self.root / "latest").unlink(missing_ok=True)

    def begin(self, step: int) -> Path:
        """The folder for a new checkpoint. An older one of this step stops being whole before it is overwritten."""
        path = self.path(step)
        (path / MANIFEST).unlink(missing_ok=True)
        make_folders(self.root.parent, self.root.name, path.name)
        shutil.rmtree(path / "dcp", ignore_errors=True)
        return path

    def seal(self, step: int, score: float | None = None, *, pattern: str = "*") -> None:
        """Mark the files of a checkpoint complete, all or those of a pattern: sync them and their folders, then write the manifest."""
        path = self.path(step)
        files = {
            str(file.relative_to(path)): FileEntry(file.stat().st_size, _digest(file, sync=True))
            for file in sorted(path.rglob(pattern))
            if file.is_file() and file.name != MANIFEST
        }
        for folder in (*(child for child in path.rglob("*") if child.is_dir()), path):
            sync_folder(folder)
        write_durably(path / MANIFEST, msgspec.json.encode(Manifest(step, files, score)))
        for folder in (self.root, self.root.parent):  # the run folder has the name of this one
            sync_folder(folder)

    def set_score(self, step: int, score: float) -> None:
        """Give a whole checkpoint its score; one that was removed meanwhile needs none."""
        manifest = self.whole().get(step)
        if manifest is not None and manifest.score != score:
            write_durably(
                self.path(step) / MANIFEST, msgspec.json.encode(msgspec.structs.replace(manifest, score=score))
            )

    def problem(self, step: int, pattern: str = "*") -> str:
        """Why a checkpoint cannot be loaded, all or the files of a pattern; "" if it can be. It reads every byte of them."""
        path = self.path(step)
        if not path.is_dir():
            return "is missing"
        if (manifest := self.whole().get(step)) is None:
            return f"is incomplete (no {MANIFEST})"
        for name, entry in manifest.files.items():
            file = path / name
            if not Path(name).match(pattern):
                continue
            if not file.is_file():
                return f"lacks {name}"
            if (size := file.stat().st_size) != entry.num_bytes:
                return f"has {size} of {entry.num_bytes} bytes of {name}"
            if _digest(file) != entry.digest:
                return f"has a damaged {name}: its digest is wrong"
        return ""

    def prune(self, newest: int, keep: int, *, keep_best: bool = False, unscored_after: int | None = None) -> None:
        """Remove checkpoints up to `newest` but the last `keep` whole ones, the one that `latest` names and the best.

        Of equal scores the newest is the best, which `best` names. Those after `newest` are of a run that was resumed from an
        earlier one, those after `unscored_after` may get a score yet.
        """
        whole = {step: manifest for step, manifest in self.whole().items() if step <= newest}
        kept: set[int | None] = {*list(whole)[-keep:]}
        with suppress(SettingError):  # the hub writes the name again with the next checkpoint
            kept.add(self.latest())
        scores = {step: manifest.score for step, manifest in whole.items() if manifest.score is not None}
        if keep_best and scores:
            best = max(scores, key=lambda step: (scores[step], step))
            kept.add(best)
            write_durably(self.root / "best", self.path(best).name.encode())
        if unscored_after is not None:
            kept.update(step for step in whole if step > unscored_after)
        for step in {*whole, *(step for step in self.incomplete() if step <= newest)} - kept:
            (self.path(step) / MANIFEST).unlink(missing_ok=True)  # first, so a part of it never counts as whole
            shutil.rmtree(self.path(step))


def write_durably(path: Path, *content: bytes | memoryview) -> None:
    """Replace a file; after a power cut it has the old content or the new one."""
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("wb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that its names are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(file: Path, *, sync: bool = False) -> str:
    """xxh3 of a file's bytes; with `sync` they are on the disk afterwards."""
    state = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            state.update(block)
        if sync:
            os.fsync(stream.fileno())
    return state.hexdigest()


def _read_manifest(path: Path) -> Manifest | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def number_of(name: str) -> int:
    """N of the name `step_N`, -1 of another name."""
    number = name.removeprefix("step_")
    return int(number) if number != name and number.isdecimal() else -1


def share_by_umask(path: Path) -> None:
    """Give a file the permissions of one that `open` has made; safetensors makes files that their owner alone can read."""
    status = Path("/proc/self/status").read_text()  # `os.umask` would change it for the other threads meanwhile
    umask = next(line.split()[1] for line in status.splitlines() if line.startswith("Umask:"))
    path.chmod(0o666 & ~int(umask, 8))
