"""The storage units of all relays as one table: a row is written to two units and read from either.

A unit is named for its relay and incarnation (`relay-1#2`): the rows of an earlier process of the same relay are gone, and a
message about the earlier unit cannot be mistaken for one about the new unit.
"""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from ...comm.errors import HeadraceError, PeerGone, StorageFull, WaitTimeout, WrongDigest
from ...comm.messages.base import storage_id_of
from ...comm.waits import waiting

if TYPE_CHECKING:
    from ...comm.fleet import Fleet
    from ...comm.storage.client import Columns, StorageClient

log = logging.getLogger(__name__)

COPIES = 2
RETRY_S = 0.05
HEARTBEATS = 20
"""Heartbeats within which every process knows of a new unit."""


class RowNotFound(HeadraceError):
    """None of a row's units can return it; the message gives the reason for each."""


class ReplicatedRows:
    """All units, each connected on first use. Any thread may use it."""

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet
        self._clients: dict[str, StorageClient] = {}
        self._failed: set[str] = set()
        self._lock = threading.Lock()

    def put_row(self, key: str, columns: "Columns") -> list[str]:
        """Write a new row to two units if there are two, the nearest first; returns the units that have it.

        Waits while all are full or dead: a relay's next process brings a new unit. Raises `WaitTimeout`.
        """
        with waiting("storage units", f"room for row {key}", self._fleet.settings.deadline_s) as wait:
            return wait.until(lambda: self.try_put_rows({key: columns}), RETRY_S)

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

    def add_columns(self, key: str, storage_ids: Iterable[str], columns: "Columns") -> list[str]:
        """Add columns to a row in all its units; returns the units that have them."""
        held: list[str] = []
        for unit in storage_ids:
            try:
                if self._put(unit, {key: columns}):
                    held.append(unit)
            except StorageFull as error:
                self._mark_failed(unit, error)
        return held

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
        """A message about a relay's next unit may arrive before the heartbeat that announces it: waits for a few of them."""
        settings = self._fleet.settings
        try:
            with waiting(f"unit {storage_id}", "its address", HEARTBEATS * settings.heartbeat_s) as wait:
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
