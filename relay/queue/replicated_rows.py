"""The storage units of all relays as one table: a row is written to two units and read from either.

A unit is named for its relay and incarnation (`relay-1#2`): the rows of an earlier process of the same relay are gone, and a
message about the earlier unit cannot be mistaken for one about the new unit.
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from ...comm.errors import HeadraceError, PeerGone, StorageFull, WaitTimeout, WrongDigest
from ...comm.messages.base import storage_id_of
from ...comm.messages.queue import RowRef
from ...comm.waits import waiting

if TYPE_CHECKING:
    from ...comm.fleet import Fleet
    from ...comm.storage.client import Columns, StorageClient

log = logging.getLogger(__name__)

COPIES = 2
MOST_TOGETHER = 64
"""Most rows in one request: they wait for each other, and those that are read share a buffer."""
RETRY_S = 0.05
ANNOUNCED_S = 5.0
"""Seconds within which every process hears of a new unit."""


class RowNotFound(HeadraceError):
    """None of a row's units can return it; the message gives the reason for each."""


def _by_unit(units_of: Iterable[tuple[str, Sequence[str]]]) -> Iterator[tuple[str, list[str]]]:
    """(unit, keys of the rows that go to or come from it together) from the units of each row."""
    keys: dict[str, list[str]] = {}
    for key, units in units_of:
        for unit in units:
            keys.setdefault(unit, []).append(key)
    for unit, theirs in keys.items():
        for start in range(0, len(theirs), MOST_TOGETHER):
            yield unit, theirs[start : start + MOST_TOGETHER]


class ReplicatedRows:
    """All units, each connected on first use. Any thread may use it."""

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet
        self._clients: dict[str, StorageClient] = {}
        self._failed: set[str] = set()
        self._lock = threading.Lock()

    def put_new(self, rows: Mapping[str, "Columns"]) -> dict[str, list[str]]:
        """Write new rows together to two units if there are two, the nearest first; returns the units that have each.

        Where no unit has room for all of them, they go one by one. Waits while all are full or dead: a relay's next process brings a
        new unit. Raises `WaitTimeout`.
        """
        if len(rows) > 1 and (units := self.try_put_rows(rows)) is not None:
            return {key: list(units) for key in rows}
        held: dict[str, list[str]] = {}
        for key, columns in rows.items():
            with waiting("storage units", f"room for row {key}", self._fleet.settings.deadline_s) as wait:
                held[key] = wait.until(lambda row={key: columns}: self.try_put_rows(row), RETRY_S)
        return held

    def try_put_rows(self, rows: Mapping[str, "Columns"]) -> list[str] | None:
        """Write rows to two units if there are two; returns the units that have them, None if all are full or dead."""
        with suppress(StorageFull):
            return self.put_rows(rows) or None

    def put_rows(self, rows: Mapping[str, "Columns"]) -> list[str]:
        """Write rows to two units if there are two; returns the units that have them, none if all are dead.

        Waits for the first unit. Raises `StorageFull` if units live and none has room, `WaitTimeout`.
        """
        held: list[str] = []
        full: StorageFull | None = None
        for unit in self._nearest_first():
            try:
                if len(held) < COPIES and self._put(unit, rows):
                    held.append(unit)
            except StorageFull as error:
                full = error
        if full is not None and not held:
            raise full
        return held

    def add_columns(self, rows: Sequence[RowRef], columns: Mapping[str, "Columns"]) -> dict[str, list[str]]:
        """Add columns to rows, by the rows' keys, in all their units, together those of a unit; returns the units that have them."""
        held: dict[str, list[str]] = {row.key: [] for row in rows}
        for unit, keys in _by_unit((row.key, row.storage_ids) for row in rows):
            try:
                if self._put(unit, {key: columns[key] for key in keys}):
                    for key in keys:
                        held[key].append(unit)
            except StorageFull as error:
                self._mark_failed(unit, error)
        return held

    def get_rows(
        self, rows: Sequence[RowRef], columns: Iterable[str] | None = None
    ) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, str]]:
        """Columns of rows, all or those named, by the rows' keys; and the reasons for the rows that none of their units returns.

        Those whose first copies are in one unit are read together. If that fails, each of them is read alone, from any of its units.
        """
        names = None if columns is None else list(columns)
        found: dict[str, dict[str, np.ndarray]] = {}
        reasons: dict[str, str] = {}
        for unit, keys in _by_unit((row.key, row.storage_ids[:1]) for row in rows):
            try:
                found |= self._client(unit).get_many(keys, names)
            except PeerGone as error:
                self._mark_failed(unit, error)
            except (WrongDigest, KeyError) as error:
                log.debug("%d rows are read one by one: %s", len(keys), error)
        for row in rows:
            if row.key not in found:
                try:
                    found[row.key] = self.get_row(row.key, row.storage_ids, names)
                except RowNotFound as error:
                    reasons[row.key] = str(error)
        return found, reasons

    def get_row(
        self, key: str, storage_ids: Sequence[str], columns: Iterable[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Columns of a row, all or those named, from the first of `storage_ids` that returns them.

        Raises `RowNotFound` if none does: each is dead, does not hold the row, or its bytes do not match their digest.
        """
        names = None if columns is None else list(columns)
        reasons: list[str] = []
        for unit in storage_ids:
            try:
                return self._client(unit).get(key, names)
            except (PeerGone, WrongDigest, KeyError) as error:
                reasons.append(f"{unit}: {type(error).__name__} ({error})")
                self._mark_failed(unit, error)
        raise RowNotFound(f"row {key}: {'; '.join(reasons) or 'it has no unit'}")

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def _put(self, storage_id: str, rows: Mapping[str, "Columns"]) -> bool:
        try:
            self._client(storage_id).put_many(rows)
        except PeerGone as error:
            self._mark_failed(storage_id, error)
            return False
        return True

    def _nearest_first(self) -> list[str]:
        """Units of the living relays: the one that serves this process, then the others by index, in a circle.

        Waits for the first one. Raises `WaitTimeout`.
        """
        near = self._fleet.nearest("relay", having="unit").name
        relays = self._fleet.alive_members("relay", having="unit")
        start = next((place for place, relay in enumerate(relays) if relay.name == near), 0)
        return [storage_id_of(relay.name, relay.incarnation) for relay in relays[start:] + relays[:start]]

    def _client(self, storage_id: str) -> "StorageClient":
        with self._lock:
            if storage_id in self._failed:
                raise PeerGone(f"unit {storage_id} is gone")
            if storage_id in self._clients:
                return self._clients[storage_id]
        address = self._address(storage_id)
        with self._lock:
            if storage_id not in self._clients:
                self._clients[storage_id] = self._fleet.open_rows(address)
            return self._clients[storage_id]

    def _address(self, storage_id: str) -> str:
        """A message about a relay's next unit may arrive before its address does: waits a moment for that."""
        try:
            with waiting(f"unit {storage_id}", "its address", ANNOUNCED_S) as wait:
                return wait.until(lambda: self._announced(storage_id), RETRY_S)
        except WaitTimeout as timeout:
            raise PeerGone(f"unit {storage_id} is not announced") from timeout

    def _announced(self, storage_id: str) -> str | None:
        """The address of a unit, None if its relay has not announced it yet. Raises `PeerGone` once it is dead."""
        name, _, incarnation = storage_id.partition("#")
        for relay in self._fleet.members("relay"):
            if relay.name == name and relay.incarnation >= int(incarnation):
                if relay.incarnation > int(incarnation) or not relay.is_alive:
                    raise PeerGone(f"unit {storage_id} is gone")
                return relay.info.get("unit")
        return None

    def _mark_failed(self, storage_id: str, error: Exception) -> None:
        """Log the error; do not use a dead unit again: its relay's next process has another name."""
        if storage_id in self._failed:
            return
        log.warning("storage unit %s failed: %s", storage_id, error)
        if isinstance(error, PeerGone):
            with self._lock:
                self._failed.add(storage_id)
                client = self._clients.pop(storage_id, None)
            if client is not None:
                client.close()
