"""Snapshots of the hub's state, so that the next hub folds the newest events alone.

A snapshot is never needed: the events give the same state. It counts only if its bytes are whole, if the files that make the state are
those that made it, and if the journal has the same lines before its place. It is data: reading it runs no code.
"""

import gc
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from ...comm.disk import make_folders
from .files import folder_of, named_by_place, parts_of, tail_digest
from .hub_state import HubState
from .records import QueueIndex

_KEPT = 2
"""The newest one may be torn by a power cut."""
_DIGEST_DIGITS = 16

_log = logging.getLogger(__name__)


class SavedState(msgspec.Struct, frozen=True, array_like=True):
    """`state` after the first `place` bytes of a journal, whose last ones have the digest `tail`; `code` made it."""

    code: str
    place: int
    tail: str
    state: msgspec.Raw


def write_snapshot(journal: Path, place: int, state: HubState) -> None:
    """Write the state after the last line of a journal, which is at `place`. Raises `OSError`.

    It is not synced: a torn one is not used.
    """
    newest = parts_of(journal)[-1]
    tail = tail_digest(journal, place - newest.start)
    # The indexes are made again from the groups, so that no object is in it twice.
    bare = replace(state, held={}, queue=QueueIndex(state.queue.needs))
    body = msgspec.msgpack.encode(SavedState(code_digest(), place, tail, msgspec.Raw(msgspec.msgpack.encode(bare))))
    folder = make_folders(journal.parent, folder_of(journal).name)
    new = folder / "snapshot.new"
    try:
        new.write_bytes(xxhash.xxh3_64_hexdigest(body).encode() + body)
        new.replace(folder / f"{place}.state")
    except OSError:
        new.unlink(missing_ok=True)
        raise
    for old in list(named_by_place(journal, "state").values())[:-_KEPT]:
        old.unlink(missing_ok=True)


def snapshots_of(journal: Path) -> Iterator[tuple[int, HubState]]:
    """The snapshots of a journal that count, as (place, state), the newest first. The caller may change the state."""
    for path in reversed(named_by_place(journal, "state").values()):
        if (found := _read(path, journal)) is None:
            _log.warning("%s is not used: it is torn, or of another journal", path)
        elif found.code != code_digest():
            _log.warning("%s is not used: it was made by another version of the program", path)
        else:
            yield found.place, _decoded(found.state)


def synced_place(journal: Path) -> int:
    """A place up to which the lines of a journal are on the disk, undamaged by a power cut: that of the newest snapshot."""
    found = (_read(path, journal) for path in reversed(named_by_place(journal, "state").values()))
    return next((snapshot.place for snapshot in found if snapshot is not None), 0)


@cache
def code_digest() -> str:
    """xxh3 of the files of this folder and of the messages' one, whose classes and rules make the state, and of what runs them."""
    digest = xxhash.xxh3_64(f"{sys.version_info[:2]} {msgspec.__version__}".encode())
    here = Path(__file__).resolve().parent
    for folder in (here, here.parents[1] / "comm" / "messages"):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@contextmanager
def no_collections() -> Iterator[None]:
    """No garbage is looked for meanwhile: the body makes many objects, and none refers to itself."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _read(path: Path, journal: Path) -> SavedState | None:
    """A snapshot, None if its bytes are not whole, or the journal has not these lines before its place."""
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        content = path.read_bytes()
        body = memoryview(content)[_DIGEST_DIGITS:]
        if xxhash.xxh3_64_hexdigest(body).encode() != content[:_DIGEST_DIGITS]:
            return None
        snapshot = msgspec.msgpack.decode(body, type=SavedState)
        for part in reversed(parts_of(journal)):
            if part.start < snapshot.place <= part.end:
                return snapshot if tail_digest(part.path, snapshot.place - part.start) == snapshot.tail else None
    return None


def _decoded(state: msgspec.Raw) -> HubState:
    with no_collections():
        decoded = msgspec.msgpack.decode(state, type=HubState, dec_hook=_counter)
        decoded.make_indexes()
    return decoded


def _counter(kind: type, content: Any) -> Any:
    """The one class of the state that msgspec does not know."""
    assert getattr(kind, "__origin__", None) is Counter, kind
    return Counter(content)
