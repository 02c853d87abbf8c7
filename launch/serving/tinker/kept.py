"""What a server that was started again needs of the scripts before it, on the disk: sessions, requests to models, and their results.

    DIR/recovery/SESSION/session.json        what a session samples from
    DIR/recovery/SESSION/MODEL/N.request     request N to a model, written before the client hears that it has come
    DIR/recovery/SESSION/MODEL/N.result      its result
    DIR/recovery/SESSION/MODEL/checkpoints   the model's states (`checkpoints.py`)

Each file begins with a digest. Requests, and results that nothing could compute again, are on the disk after a power cut too: files and
folders are synced. Other results are synced before a checkpoint replaces the requests from which they could be computed.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import xxhash

from ....comm.disk import make_folders, when_writable
from ....comm.errors import SettingError
from ....relay.checkpoints import sync_folder, write_durably

ROOM_S = 600.0
"""Longest time for which a result waits for room on the disk."""
SAVE_FOR_SAMPLER = "save_weights_for_sampler"
_FOLDER = "recovery"
_LOCK = "lock"
_SESSION = "session.json"
_REQUEST = ".request"
_RESULT = ".result"
_TRIES = ".tries"
_DIGEST_BYTES = 16


class KeptSession(msgspec.Struct, frozen=True):
    """A session; `samplers` has the paths of its samplers of saved weights, None for the initial ones."""

    session_id: str
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    samplers: dict[str, str | None] = {}


class KeptRequest(msgspec.Struct, frozen=True):
    """A request to a model: the name of its route, and its body."""

    kind: str
    raw: bytes

    @property
    def digest(self) -> bytes:
        """What tells it from another request with its number.

        The SDK counts the sampling sessions that it asks for, and counts on when it sends the same request again.
        """
        if self.kind != SAVE_FOR_SAMPLER:
            return xxhash.xxh3_128_digest(self.raw)
        fields = msgspec.json.decode(self.raw)
        return xxhash.xxh3_128_digest(msgspec.json.encode({**fields, "sampling_session_seq_id": None}, order="sorted"))


class KeptResult(msgspec.Struct, frozen=True):
    """What a client gets for a request. digest: that of the request. problem: the error, empty without one."""

    digest: bytes
    media_type: str
    body: bytes
    problem: str = ""
    is_performed: bool = True
    """False for a request that was given up before it was carried out."""


class KeptScripts:
    """The folder of all that is kept. `write_request` may be called in any thread, for each number once; the rest as its methods say."""

    def __init__(self, root: Path) -> None:
        """root: the folder of saved weights. Raises `SettingError` while another server uses it."""
        self._root = make_folders(root, _FOLDER)
        self._lock = _lock(root, self._root / _LOCK)
        self._unsynced: dict[str, set[int]] = {}
        self._fetched: dict[str, dict[int, float]] = {}
        """When clients fetched results, by model and number."""

    def close(self) -> None:
        """Let another server use the folder."""
        if self._lock is not None:
            self._lock.close()

    # ---------------------------------------------------------------------------------------------------------- sessions

    def write_session(self, session: KeptSession) -> None:
        """Keep a session. Raises `OSError`."""
        folder = self._root / session.session_id
        if not folder.exists():
            make_folders(self._root, session.session_id)
            sync_folder(self._root)
        write_durably(folder / _SESSION, msgspec.json.encode(session))

    def sessions(self) -> Iterator[tuple[KeptSession, float]]:
        """The sessions, the one that was silent for the longest time first, each with its last sign of life in seconds since 1970."""
        found: list[tuple[KeptSession, float]] = []
        for folder in [path for path in self._root.iterdir() if path.is_dir()]:
            file = folder / _SESSION
            if not file.exists():  # it had ended
                shutil.rmtree(folder, ignore_errors=True)
                continue
            with suppress(OSError, msgspec.DecodeError):
                session = msgspec.json.decode(file.read_bytes(), type=KeptSession)
                if session.session_id == file.parent.name:
                    found.append((session, file.stat().st_mtime))
        yield from sorted(found, key=lambda item: item[1])

    def note_life(self, session_id: str) -> None:
        """Note a sign of life."""
        with suppress(OSError):
            os.utime(self._root / session_id / _SESSION)

    def end_session(self, session_id: str) -> None:
        """Let no later server take a session."""
        (self._root / session_id / _SESSION).unlink(missing_ok=True)

    def remove_session(self, session_id: str) -> None:
        """Forget a session and its models."""
        self.end_session(session_id)
        shutil.rmtree(self._root / session_id, ignore_errors=True)

    def models(self, session_id: str) -> list[str]:
        """The ids of a session's models."""
        folders = (self._root / session_id).glob(f"{session_id}:*")
        return sorted((path.name for path in folders), key=lambda name: (len(name), name))

    def folder(self, model_id: str) -> Path:
        """The folder of a model."""
        return self._root / model_id.partition(":")[0] / model_id

    def remove_model(self, model_id: str) -> None:
        """Forget a model."""
        shutil.rmtree(self.folder(model_id), ignore_errors=True)
        self._fetched.pop(model_id, None)
        self._unsynced.pop(model_id, None)

    # ---------------------------------------------------------------------------------------------------------- requests

    def write_request(self, model_id: str, number: int, request: KeptRequest) -> None:
        """Keep a request; it is on the disk when this returns. Raises `OSError`."""
        folder = self.folder(model_id)
        if not folder.exists():
            folder.mkdir(exist_ok=True)
            sync_folder(folder.parent)
        write_durably(folder / f"{number}{_REQUEST}", *_sealed(request))

    def request(self, model_id: str, number: int) -> KeptRequest:
        """A request. Raises `SettingError` for one that is damaged, and `OSError`."""
        file = self.folder(model_id) / f"{number}{_REQUEST}"
        found = _unsealed(file.read_bytes(), KeptRequest)
        if found is None:
            problem = f"request {number} of {model_id} is damaged on the disk ({file}), so the model is lost"
            raise SettingError(f"{problem}; continue from a state that it saved")
        return found

    def remove_request(self, model_id: str, number: int) -> None:
        """Forget a request that came too late."""
        (self.folder(model_id) / f"{number}{_REQUEST}").unlink(missing_ok=True)

    def numbers(self, model_id: str) -> tuple[set[int], set[int]]:
        """The numbers of the requests that are kept, and those of the results."""
        found: dict[str, set[int]] = {_REQUEST: set(), _RESULT: set()}
        for file in self.folder(model_id).glob("*.*"):
            if file.suffix in found and file.stem.isdecimal():
                found[file.suffix].add(int(file.stem))
        return found[_REQUEST], found[_RESULT]

    def count_try(self, model_id: str, number: int) -> int:
        """How often a request was begun by servers that were started again, this time included. Raises `OSError`."""
        file = self.folder(model_id) / f"{number}{_TRIES}"
        tries = file.stat().st_size + 1 if file.exists() else 1
        file.write_bytes(b"." * tries)
        return tries

    # ----------------------------------------------------------------------------------------------------------- results

    def write_result(self, model_id: str, number: int, result: KeptResult, *, is_synced: bool) -> None:
        """Keep a result, in the main thread. Waits for room on the disk: raises `DiskFull`, and `OSError`."""
        file = self.folder(model_id) / f"{number}{_RESULT}"
        if is_synced:
            when_writable(file, lambda: write_durably(file, *_sealed(result)), ROOM_S)
        else:
            when_writable(file, lambda: _write(file, _sealed(result)), ROOM_S)
            self._unsynced.setdefault(model_id, set()).add(number)

    def result(self, model_id: str, number: int) -> KeptResult | None:
        """A result; None if there is none, or if it is damaged."""
        try:
            return _unsealed((self.folder(model_id) / f"{number}{_RESULT}").read_bytes(), KeptResult)
        except OSError:
            return None

    def sync_results(self, model_id: str) -> None:
        """Have all results of a model on the disk, in the main thread. Raises `OSError`."""
        numbers = self._unsynced.get(model_id, set())
        folder = self.folder(model_id)
        for number in numbers:
            with (folder / f"{number}{_RESULT}").open("rb") as file:
                os.fsync(file.fileno())
        if numbers:
            sync_folder(folder)
        self._unsynced.pop(model_id, None)

    def note_fetched(self, model_id: str, number: int) -> None:
        """Note that a client has fetched a result."""
        self._fetched.setdefault(model_id, {})[number] = time.monotonic()

    def prune(self, model_id: str, number: int, fetched_for_s: float) -> None:
        """Remove the requests before a number, and those results that were fetched this long ago; in any thread."""
        requests, results = self.numbers(model_id)
        folder = self.folder(model_id)
        for old in (old for old in requests if old < number):
            for suffix in (_REQUEST, _TRIES):
                (folder / f"{old}{suffix}").unlink(missing_ok=True)
        fetched = self._fetched.get(model_id, {})
        before = time.monotonic() - fetched_for_s
        for old in (old for old in results if old < number and fetched.get(old, before + 1) <= before):
            (folder / f"{old}{_RESULT}").unlink(missing_ok=True)
            fetched.pop(old, None)


def _lock(root: Path, file: Path) -> IO[bytes] | None:
    """A lock on a folder until it is closed; None on a file system without locks."""
    opened = file.open("ab")
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        opened.close()
        raise SettingError(f"--dir={root}: another server uses this folder; name another one") from error
    except OSError:
        opened.close()
        return None
    return opened


def _sealed(value: msgspec.Struct) -> tuple[bytes, bytes]:
    """The content of a file: a digest, and what it is of."""
    content = msgspec.msgpack.encode(value)
    return xxhash.xxh3_128_digest(content), content


def _unsealed(content: bytes, kind: Callable[..., Any]) -> Any:
    """What a file has; None if its digest is another one."""
    if xxhash.xxh3_128_digest(content[_DIGEST_BYTES:]) != content[:_DIGEST_BYTES]:
        return None
    try:
        return msgspec.msgpack.decode(content[_DIGEST_BYTES:], type=kind)
    except msgspec.DecodeError:
        return None


def _write(file: Path, content: tuple[bytes, bytes]) -> None:
    """Write a file that is worth nothing while it is incomplete."""
    with file.open("wb") as stream:
        stream.writelines(content)
