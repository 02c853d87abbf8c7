"""Snapshots of the hub's state beside its journal, so that who recovers it folds only what came after.

A snapshot names the digest of the journal's bytes that it stands for, and of the rules that folded them. One that does not
fit counts for nothing: the next older one is tried, and then the journal is folded from its first line.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

import msgspec
import xxhash

from . import events, group, records, state
from .state import HubState

log = logging.getLogger(__name__)

KEPT = 4
_BLOCK_BYTES = 1 << 20
_RULES = xxhash.xxh3_64_intdigest(
    b"".join(Path(module.__file__ or "").read_bytes() for module in (events, group, records, state))
)


class Prefix:
    """The first bytes of a journal: how many lines and bytes, and their digest."""

    def __init__(self) -> None:
        self.num_lines = 0
        self.num_bytes = 0
        self._digest = xxhash.xxh3_64()

    @staticmethod
    def of(journal: Path, num_bytes: int) -> "Prefix":
        """The first `num_bytes` of a journal, or all of it where it is shorter."""
        prefix = Prefix()
        with journal.open("rb") as file:
            while block := file.read(min(_BLOCK_BYTES, num_bytes - prefix.num_bytes)):
                prefix.add(block)
        return prefix

    @property
    def digest(self) -> int:
        """xxh3 of the bytes."""
        return self._digest.intdigest()

    def add(self, data: bytes) -> None:
        """Go on by so many bytes."""
        self.num_lines += data.count(b"\n")
        self.num_bytes += len(data)
        self._digest.update(data)


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The state after the first lines of a journal."""

    num_lines: int
    num_bytes: int
    journal_digest: int
    rules: int
    state_digest: int
    body: bytes

    @staticmethod
    def of(hub_state: HubState, prefix: Prefix) -> "Snapshot":
        """The state that the prefix folds to."""
        body = msgspec.msgpack.encode(hub_state)
        digest = xxhash.xxh3_64_intdigest(body)
        return Snapshot(prefix.num_lines, prefix.num_bytes, prefix.digest, _RULES, digest, body)

    @property
    def state(self) -> HubState:
        """The state, a copy of its own. Raises `msgspec.DecodeError`."""
        return msgspec.msgpack.decode(self.body, type=HubState, dec_hook=_decode_counter)


def write_snapshot(journal: Path, hub_state: HubState, prefix: Prefix) -> None:
    """Keep a snapshot, whole or not at all; the oldest ones go."""
    path = _path(journal, prefix.num_lines)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.msgpack.encode(Snapshot.of(hub_state, prefix)))
    part.replace(path)
    for old in _paths(journal)[KEPT:]:
        old.unlink(missing_ok=True)


def snapshots(journal: Path) -> Iterator[Snapshot]:
    """The snapshots that fit the journal, newest first."""
    for path in _paths(journal):
        try:
            snapshot = msgspec.msgpack.decode(path.read_bytes(), type=Snapshot)
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s is no snapshot: %s", path, error)
            continue
        prefix = Prefix.of(journal, snapshot.num_bytes)
        if (prefix.num_bytes, prefix.digest) != (snapshot.num_bytes, snapshot.journal_digest):
            log.warning("%s is of another journal", path)
        elif (snapshot.rules, snapshot.state_digest) != (_RULES, xxhash.xxh3_64_intdigest(snapshot.body)):
            log.warning("%s was folded by other rules, or its bytes are not what was written", path)
        else:
            yield snapshot


def _path(journal: Path, num_lines: int) -> Path:
    return journal.with_name(f"{journal.name}.snapshot-{num_lines:012d}")


def _paths(journal: Path) -> list[Path]:
    found = [p for p in journal.parent.glob(f"{journal.name}.snapshot-*") if p.suffix != ".part"]
    return sorted(found, reverse=True)


def _decode_counter(kind: Any, value: Any) -> Any:
    assert get_origin(kind) is Counter, f"a snapshot has no {kind}"
    return Counter(value)


def end_of_last_line(journal: Path) -> int:
    """Bytes of a journal up to the end of its last whole line."""
    end = os.path.getsize(journal)
    with journal.open("rb") as file:
        while end:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            block = file.read(end - start)
            if (at := block.rfind(b"\n")) >= 0:
                return start + at + 1
            end = start
    return 0
