"""The storage units of all relays as one table: a row is written to two of them and read from whichever has it.

A unit's name is its relay's with the incarnation (`relay-1#2`): what an earlier process of the same seat held is gone, and no
letter about it can be mistaken for one about the new unit.
"""

import logging
import threading
from collections.abc import Iterable, Sequence

import numpy as np

from ...comm.errors import HeadraceError, PeerGone, StorageFull, WrongDigest
from ...comm.fleet import Fleet
from ...comm.messages.base import storage_id_of
from ...comm.storage.client import Columns, StorageClient
from ...comm.waits import waiting

log = logging.getLogger(__name__)

COPIES = 2
RETRY_S = 0.05


class RowNotFound(HeadraceError):
    """No unit that is said to hold a row can give it; the message says why, unit by unit."""


class ReplicatedRows:
    """All units, connected when first needed. Any thread may use it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._clients: dict[str, StorageClient] = {}
        self._failed: set[str] = set()
        self._lock = threading.Lock()

    def attach(self) -> None:
        """Connect to a unit, if there is one: the hub then learns of this process's death from the connection's end."""
        if not self._fleet.alive_members("relay", having="unit"):
            return
        for unit in self._nearest_first():
            try:
                self._client(unit)
            except PeerGone as error:
                self._mark_failed(unit, error)
            else:
                return

    def put_row(self, key: str, columns: Columns) -> list[str]:
        """Write a new row to two units where there are two, the nearest first; returns those that have it.

        Waits while all are full; raises `PeerGone` if there is none.
        """
        with waiting("storage units", f"room for row {key}", self._fleet.settings.deadline_s) as wait:
            return wait.until(lambda: self._put_replicas(key, columns), RETRY_S)

    def add_columns(self, key: str, storage_ids: Iterable[str], columns: Columns) -> list[str]:
        """Add columns to a row in all units that hold it; returns those that have them."""
        held: list[str] = []
        for unit in storage_ids:
            try:
                if self._put(unit, key, columns):
                    held.append(unit)
            except StorageFull as error:
                self._mark_failed(unit, error)
        return held

    def get_row(
        self, key: str, storage_ids: Sequence[str], columns: Iterable[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Columns of a row, all or those named, from the first of `storage_ids` that gives them.

        Raises `RowNotFound` if none does: it died, does not hold the row, or its bytes are not those of their writer.
        """
        names = None if columns is None else list(columns)
        reasons: list[str] = []
        for unit in storage_ids:
            try:
                return self._client(unit).get(key, names)
            except (PeerGone, WrongDigest, KeyError) as error:
                reasons.append(f"{unit}: {type(error).__name__} ({error})")
                self._mark_failed(unit, error)
        raise RowNotFound(f"row {key}: {'; '.join(reasons) or 'no unit holds it'}")

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def _put_replicas(self, key: str, columns: Columns) -> list[str] | None:
        """The units that have the row; None if there are some, but all of them full."""
        held: list[str] = []
        is_full = False
        for unit in self._nearest_first():
            try:
                if len(held) < COPIES and self._put(unit, key, columns):
                    held.append(unit)
            except StorageFull:
                is_full = True
        if not held and not is_full:
            raise PeerGone(f"no storage unit takes row {key}")
        return held or None

    def _put(self, storage_id: str, key: str, columns: Columns) -> bool:
        try:
            self._client(storage_id).put(key, columns)
        except PeerGone as error:
            self._mark_failed(storage_id, error)
            return False
        return True

    def _nearest_first(self) -> list[str]:
        """Units of the living relays: the one that serves this process, then those behind it in turn."""
        relays = self._fleet.alive_members("relay", having="unit")
        near = self._fleet.nearest("relay", having="unit").name
        start = next((place for place, relay in enumerate(relays) if relay.name == near), 0)
        return [storage_id_of(relay.name, relay.incarnation) for relay in relays[start:] + relays[:start]]

    def _client(self, storage_id: str) -> StorageClient:
        with self._lock:
            if storage_id in self._failed:
                raise PeerGone(f"unit {storage_id} is gone")
            if storage_id not in self._clients:
                self._clients[storage_id] = self._fleet.open_rows(self._address(storage_id))
            return self._clients[storage_id]

    def _address(self, storage_id: str) -> str:
        for relay in self._fleet.alive_members("relay", having="unit"):
            if storage_id_of(relay.name, relay.incarnation) == storage_id:
                return relay.info["unit"]
        raise PeerGone(f"unit {storage_id} is gone")

    def _mark_failed(self, storage_id: str, error: Exception) -> None:
        """A unit that is gone stays gone: its next process has another name."""
        log.warning("unit %s: %s", storage_id, error)
        if isinstance(error, PeerGone):
            with self._lock:
                self._failed.add(storage_id)
                client = self._clients.pop(storage_id, None)
            if client is not None:
                client.close()
