"""Rows in bulk: each relay hosts a storage unit, whoever needs a row's columns fetches them from there.

A unit is a TCPStore of its own. The columns of a row that are written together are one value: a line of JSON (parts, bytes,
checksum), then safetensors bytes, without padding. What does not fit into 4 MiB goes on under keys of its own, named by
checksum, so that a row that is being overwritten can never be read as a mixture.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import xxhash
from safetensors.numpy import load, save
from torch.distributed import DistError

from .errors import PeerGone, WrongDigest
from .store import connect_store, host_store

T = TypeVar("T")

_PART_BYTES = 4 << 20
_ROW = "row/"


class Rows(Protocol):
    """A storage unit as its clients see it."""

    def put(self, key: str, columns: dict[str, np.ndarray]) -> int:
        """Add columns to a row, which begins with its first; returns their bytes once the unit has them.

        A column that the row has already is replaced as a whole; the others stay as they are.
        """
        ...

    def get(self, key: str, columns: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """A row's columns, all or those named.

        Raises `KeyError` if the unit does not hold one of them, `WrongDigest` if its bytes are not what was put.
        """
        ...

    def drop(self, keys: Iterable[str]) -> int:
        """Forget rows; returns how many of them there were."""
        ...

    def count(self) -> int:
        """Rows held, counted from what lies in the unit."""
        ...


class RowUnit:
    """A storage unit in this process, on one interface; `address` is "host:port". It ends with `close`."""

    def __init__(self, interface: str) -> None:
        self._hosted = host_store(interface)
        self.address = self._hosted.address

    def close(self) -> None:
        """Forget all rows and stop listening."""
        del self._hosted


class _Head(msgspec.Struct, frozen=True, array_like=True):
    num_parts: int
    num_bytes: int
    checksum: int

    def part(self, key: str, index: int) -> str:
        """The key of part `index` >= 1; part 0 lies with the head."""
        return f"part/{key}/{self.checksum:x}/{index}"


class RowClient:
    """One unit's client. Any thread may use it, one at a time. Raises `PeerGone` when the unit is gone."""

    def __init__(self, address: str, deadline_s: float = 30.0) -> None:
        self.address = address
        self._store = connect_store(address, deadline_s)
        self._lock = threading.Lock()

    def put(self, key: str, columns: dict[str, np.ndarray]) -> int:
        """Add columns to a row; returns their bytes once the unit has acknowledged them."""
        with self._lock:
            held = self._try(lambda: self._head(key)) is not None
        body = save({name: np.ascontiguousarray(c) for name, c in ((self.get(key) if held else {}) | columns).items()})
        parts = [body[start : start + _PART_BYTES] for start in range(0, len(body), _PART_BYTES)]
        head = _Head(len(parts), len(body), xxhash.xxh3_64_intdigest(body))
        with self._lock:
            return self._try(lambda: self._put(key, head, parts))

    def get(self, key: str, columns: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """A row's columns, checked against the checksum of the writer."""
        with self._lock:
            head, body = self._try(lambda: self._get(key))
        if len(body) != head.num_bytes or xxhash.xxh3_64_intdigest(body) != head.checksum:
            raise WrongDigest(f"row {key} of unit {self.address}: {len(body)} bytes that are not those of its writer")
        row = load(body)
        return row if columns is None else {name: row[name] for name in columns}

    def drop(self, keys: Iterable[str]) -> int:
        """Forget rows; returns how many of them there were."""
        with self._lock:
            return sum(self._try(lambda key=key: self._drop(key)) for key in keys)

    def count(self) -> int:
        """Rows held, counted from the unit's keys."""
        with self._lock:
            return self._try(lambda: sum(key.startswith(_ROW) for key in self._store.list_keys()))

    def _put(self, key: str, head: _Head, parts: list[bytes]) -> int:
        before = self._head(key)
        for index in range(1, head.num_parts):
            self._store.set(head.part(key, index), parts[index])
        self._store.set(_ROW + key, msgspec.json.encode(head) + b"\n" + parts[0])
        if before is not None and before != head:
            self._delete_parts(key, before)
        # `set` is not acknowledged; an answer on the same connection is.
        if not self._store.check([_ROW + key]):
            raise PeerGone(f"unit {self.address} lost row {key}")
        return head.num_bytes

    def _get(self, key: str) -> tuple[_Head, bytes]:
        if not self._store.check([_ROW + key]):
            raise KeyError(key)
        line, _, body = self._store.get(_ROW + key).partition(b"\n")
        head = msgspec.json.decode(line, type=_Head)
        names = [head.part(key, index) for index in range(1, head.num_parts)]
        if names and self._store.check(names):
            body = b"".join([body, *(self._store.get(name) for name in names)])
        return head, body

    def _drop(self, key: str) -> bool:
        head = self._head(key)
        if head is None:
            return False
        self._delete_parts(key, head)
        return self._store.delete_key(_ROW + key)

    def _head(self, key: str) -> _Head | None:
        if not self._store.check([_ROW + key]):
            return None
        return msgspec.json.decode(self._store.get(_ROW + key).partition(b"\n")[0], type=_Head)

    def _delete_parts(self, key: str, head: _Head) -> None:
        for index in range(1, head.num_parts):
            self._store.delete_key(head.part(key, index))

    def _try(self, operation: Callable[[], T]) -> T:
        try:
            return operation()
        except DistError as error:
            raise PeerGone(f"unit {self.address} is gone: {error}") from error


class MemoryRows:
    """The twin within one process; rows are encoded as on the wire, so that what is read is never what is still written."""

    address = "memory"

    def __init__(self) -> None:
        self._rows: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, columns: dict[str, np.ndarray]) -> int:
        """Add columns to a row."""
        with self._lock:
            held = load(self._rows[key]) if key in self._rows else {}
            self._rows[key] = save({name: np.ascontiguousarray(c) for name, c in (held | columns).items()})
            return sum(column.nbytes for column in columns.values())

    def get(self, key: str, columns: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """A row's columns, all or those named."""
        with self._lock:
            row = load(self._rows[key])
        return row if columns is None else {name: row[name] for name in columns}

    def drop(self, keys: Iterable[str]) -> int:
        """Forget rows."""
        with self._lock:
            return sum(self._rows.pop(key, None) is not None for key in keys)

    def count(self) -> int:
        """Rows held."""
        with self._lock:
            return len(self._rows)
