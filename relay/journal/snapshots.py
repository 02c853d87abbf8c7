"""Snapshots of the hub's state, so that the next hub folds the newest events alone.

A snapshot is never needed: the events give the same state. It counts only if its bytes are whole, if the files that make the state are
those that made it, and if the journal has the same lines before its place. It is data: reading it runs no code.
"""

import gc
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from msgspec.inspect import type_info

from ...comm.disk import make_folders
from .files import folder_of, named_by_place, open_part, parts_of, tail_digest
from .hub_state import HubState
from .records import QueueIndex

_KEPT = 2
"""The newest one may be torn by a power cut."""
NEW_SNAPSHOT = "snapshot.new"
"""The name of one that is being written."""
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
    with open_part(newest) as file:
        tail = tail_digest(file, place - newest.start)
    # The indexes are made again from the groups, so that no object is in it twice.
    bare = replace(state, held={}, queue=QueueIndex(state.queue.needs))
    body = msgspec.msgpack.encode(SavedState(CODE, place, tail, msgspec.Raw(msgspec.msgpack.encode(bare))))
    folder = make_folders(journal.parent, folder_of(journal).name)
    new = folder / NEW_SNAPSHOT
    try:
        new.write_bytes(xxhash.xxh3_64_hexdigest(body).encode() + body)
        new.replace(_path(journal, place))
    except OSError:
        new.unlink(missing_ok=True)
        raise
    at_beginnings = places_at_beginnings(journal)
    for old_place, old in list(named_by_place(journal, "state").items())[:-_KEPT]:
        if old_place not in at_beginnings:
            old.unlink(missing_ok=True)


def places_at_beginnings(journal: Path) -> list[int]:
    """The places of the first snapshot in each file of the history but the oldest one.

    These are kept, so that processes can verify the files beside each other: 2.5 MB for the 256 MiB of a file.
    """
    places = [*named_by_place(journal, "state")]
    firsts = (
        next((place for place in places if part.start < place <= part.end), None) for part in parts_of(journal)[1:]
    )
    return [place for place in firsts if place is not None]


def snapshots_of(journal: Path, places: Iterable[int] | None = None) -> Iterator[tuple[int, HubState]]:
    """The snapshots of a journal that count, as (place, state), each read when it is asked for. The caller may change the state.

    places: look at these alone, in this order; by default at all, the newest first. Raises `JournalError` if the newest file of the
    journal does not say where it begins.
    """
    for snapshot in _that_count(journal, reversed(named_by_place(journal, "state")) if places is None else places):
        try:
            yield snapshot.place, _decoded(snapshot.state)
        except msgspec.DecodeError as error:
            _log.warning("%s is not used: %s", _path(journal, snapshot.place), error)


def places_between(journal: Path) -> list[int]:
    """Those of `places_at_beginnings` with a snapshot that counts."""
    return [snapshot.place for snapshot in _that_count(journal, places_at_beginnings(journal))]


def _that_count(journal: Path, places: Iterable[int]) -> Iterator[SavedState]:
    for place in places:
        path = _path(journal, place)
        try:
            yield _read(path, journal)
        except FileNotFoundError:
            continue  # the hub of the journal has made another one
        except (OSError, ValueError, msgspec.DecodeError) as error:
            _log.warning("%s is not used: %s", path, error)


def _path(journal: Path, place: int) -> Path:
    return folder_of(journal) / f"{place}.state"


def code_digest() -> str:
    """xxh3 of what makes the state: the fields of its classes, the files of this folder and of the messages' one, and what runs them."""
    digest = xxhash.xxh3_64(f"{sys.version_info[:2]} {msgspec.__version__} {type_info(HubState)}".encode())
    here = Path(__file__).resolve().parent
    for folder in (here, here.parents[1] / "comm" / "messages"):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


CODE = code_digest()
"""That of this process, taken while it loads the files: later they may be those of another version of the program."""


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


def _read(path: Path, journal: Path) -> SavedState:
    """A snapshot that this program has made of this journal. Raises `OSError`, `ValueError` and `msgspec.DecodeError`."""
    content = path.read_bytes()
    body = memoryview(content)[_DIGEST_DIGITS:]
    if xxhash.xxh3_64_hexdigest(body).encode() != content[:_DIGEST_DIGITS]:
        raise ValueError("it is torn")
    snapshot = msgspec.msgpack.decode(body, type=SavedState)
    if snapshot.code != CODE:
        raise ValueError("it was made by another version of the program")
    if snapshot.place != int(path.stem):
        raise ValueError(f"it is that of byte {snapshot.place}")
    for part in reversed(parts_of(journal)):
        if part.start < snapshot.place <= part.end:
            with open_part(part) as file:
                if tail_digest(file, snapshot.place - part.start) == snapshot.tail:
                    return snapshot
    raise ValueError("the journal has other lines before its place")


def _decoded(state: msgspec.Raw) -> HubState:
    """A state with its indexes. Raises `msgspec.DecodeError` if it has other fields or types than this program's."""
    if msgspec.msgpack.decode(state, type=dict[str, msgspec.Raw]).keys() != {field.name for field in fields(HubState)}:
        raise msgspec.ValidationError("it has other fields than the state")
    with no_collections():
        decoded = msgspec.msgpack.decode(state, type=HubState, dec_hook=_counter)
        decoded.make_indexes()
    return decoded


def _counter(kind: type, content: Any) -> Any:
    """The one class of the state that msgspec does not know."""
    assert getattr(kind, "__origin__", None) is Counter, kind
    return Counter(content)
