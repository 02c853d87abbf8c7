"""A row is stored in two units and read from either."""

import logging
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from support.in_memory import MemoryFleet, MemoryNetwork

from headrace.comm.errors import StorageFull
from headrace.comm.messages import RowId, RowRef
from headrace.comm.messages.base import process_of, storage_id_of
from headrace.comm.storage.client import StorageClient
from headrace.comm.storage.protocol import Locate, Located
from headrace.comm.storage.server import StorageServer
from headrace.relay.queue.replicated_rows import ReplicatedRows, RowNotFound

ROW = {"response_ids": np.arange(5, dtype=np.int32)}


def ref(sample: int, units: list[str]) -> RowRef:
    return RowRef(RowId(0, 0, sample), 1, units, version=0, num_tokens=5)


def row(number: int) -> dict[str, np.ndarray]:
    return {"response_ids": np.full(3 + number, number, np.int32), "reward": np.array([float(number)])}


class Cluster:
    """Relays with a storage unit each, and a process that writes and reads rows."""

    def __init__(self, count: int) -> None:
        self.network = MemoryNetwork()
        self.hosted: dict[str, StorageServer] = {}
        self.relays = [self.add_relay(index) for index in range(count)]
        self.storage = ReplicatedRows(MemoryFleet.join_network(self.network, "rollout", 1))

    def add_relay(self, index: int) -> MemoryFleet:
        fleet = MemoryFleet.join_network(self.network, "relay", index)
        unit = fleet.host_rows()
        fleet.announce(unit=unit.address)
        self.hosted[storage_id_of(fleet.name, fleet.incarnation)] = unit
        return fleet

    def close(self, name: str) -> None:
        self.hosted.pop(name).close()

    def keys(self, name: str) -> set[str]:
        client = self.client(name)
        try:
            return set(client.listing())
        finally:
            client.close()

    def client(self, name: str) -> StorageClient:
        return self.relays[0].open_rows(self.hosted[name].address)

    def spoil(self, name: str, key: str) -> None:
        """Change a byte of a row in one unit's memory."""
        client = self.client(name)
        (block,) = client._ask(Locate([key], None, False), Located).rows[0]
        self.hosted[name].arena.write(block.offset, [np.full(1, 255, np.uint8)])
        client.close()

    def drop(self, name: str, key: str) -> None:
        client = self.client(name)
        assert client.drop([key]) == 1
        client.close()


@pytest.fixture
def cluster() -> Iterator[type[Cluster]]:
    made: list[Cluster] = []

    class Closed(Cluster):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            made.append(self)

    yield Closed
    for each in made:
        each.storage.close()
        for name in list(each.hosted):
            each.close(name)
        each.network.mailboxes.close()


def test_a_row_is_written_to_two_units_the_nearest_first(cluster: type[Cluster]):
    p = cluster(3)
    held = p.storage.put_new({"0.0.0@1": ROW})["0.0.0@1"]
    assert held == ["relay-1#1", "relay-2#1"]
    assert [p.keys(name) for name in sorted(p.hosted)] == [set(), {"0.0.0@1"}, {"0.0.0@1"}]


def test_with_a_single_unit_there_is_one_copy(cluster: type[Cluster]):
    assert cluster(1).storage.put_new({"0.0.0@1": ROW})["0.0.0@1"] == ["relay-0#1"]


def test_a_row_is_read_from_the_other_copy_when_a_unit_dies_and_the_reason_is_named(
    cluster: type[Cluster], caplog: pytest.LogCaptureFixture
):
    p = cluster(2)
    held = p.storage.put_new({"0.0.0@1": ROW})["0.0.0@1"]
    p.close(held[0])
    with caplog.at_level(logging.WARNING):
        assert p.storage.get_row("0.0.0@1", held)["response_ids"].tolist() == [0, 1, 2, 3, 4]
    assert held[0] in caplog.text


def test_a_row_that_one_copy_lacks_is_read_from_the_other(cluster: type[Cluster]):
    p = cluster(2)
    held = p.storage.put_new({"0.0.0@1": ROW})["0.0.0@1"]
    p.drop(held[0], "0.0.0@1")
    assert p.storage.get_row("0.0.0@1", held)["response_ids"].tolist() == [0, 1, 2, 3, 4]


def test_a_row_whose_first_copy_is_damaged_is_read_from_the_other(
    cluster: type[Cluster], caplog: pytest.LogCaptureFixture
):
    p = cluster(2)
    held = p.storage.put_new({"0.0.0@1": ROW})["0.0.0@1"]
    p.spoil(held[0], "0.0.0@1")
    with caplog.at_level(logging.WARNING):
        assert p.storage.get_row("0.0.0@1", held)["response_ids"].tolist() == [0, 1, 2, 3, 4]
    assert f"{held[0]} failed" in caplog.text
    p.spoil(held[1], "0.0.0@1")
    with pytest.raises(RowNotFound, match=r"relay-1#1: WrongDigest .*relay-0#1: WrongDigest"):
        p.storage.get_row("0.0.0@1", held)


def test_the_error_for_a_row_without_a_copy_gives_each_units_reason(cluster: type[Cluster]):
    p = cluster(2)
    held = p.storage.put_new({"0.0.0@1": ROW})["0.0.0@1"]
    p.close(held[0])
    p.drop(held[1], "0.0.0@1")
    with pytest.raises(RowNotFound, match=r"relay-1#1: PeerGone .*relay-0#1: KeyError"):
        p.storage.get_row("0.0.0@1", held)


def test_a_restarted_relay_is_another_unit(cluster: type[Cluster]):
    p = cluster(1)
    (old,) = p.storage.put_new({"0.0.0@1": ROW})["0.0.0@1"]
    p.close(old)
    p.relays[0].crash()
    p.add_relay(0)
    with pytest.raises(RowNotFound):
        p.storage.get_row("0.0.0@1", [old])
    assert p.storage.put_new({"0.0.0@2": ROW})["0.0.0@2"] == ["relay-0#2"]
    assert process_of("relay-0#2") == process_of(old) == "relay-0"


def test_columns_are_added_to_every_copy_of_a_row_and_to_no_other_row(cluster: type[Cluster]):
    p = cluster(2)
    held = p.storage.put_new({"0.0.0@1": ROW})["0.0.0@1"]
    p.storage.put_new({"0.0.1@1": ROW})
    added = {"0.0.0@1": {"ref_logprobs": np.ones(5, np.float32)}}
    assert p.storage.add_columns([ref(0, held)], added) == {"0.0.0@1": held}
    for unit in held:
        assert set(p.storage.get_row("0.0.0@1", [unit])) == {"response_ids", "ref_logprobs"}
        assert set(p.storage.get_row("0.0.1@1", [unit])) == {"response_ids"}
        assert set(p.storage.get_row("0.0.0@1", [unit], ["ref_logprobs"])) == {"ref_logprobs"}


def test_a_write_without_a_living_unit_waits_for_the_next_one(cluster: type[Cluster]):
    p = cluster(1)
    (old,) = p.storage.put_new({"0.0.0@1": ROW})["0.0.0@1"]
    p.close(old)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(p.storage.put_new, {"0.0.1@1": ROW})
        p.relays[0].crash()
        p.add_relay(0)
        assert written.result(60) == {"0.0.1@1": ["relay-0#2"]}


def test_a_unit_is_read_although_its_relay_is_announced_after_the_message_about_its_row(cluster: type[Cluster]):
    p = cluster(1)
    p.close("relay-0#1")
    p.relays[0].crash()
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(p.storage.get_row, "0.0.0@2", ["relay-0#2"])
        p.add_relay(0)
        client = p.client("relay-0#2")
        client.put("0.0.0@2", ROW)
        client.close()
        with suppress(RowNotFound):  # the reader may have looked between the announcement and the row
            read.result(60)
    assert set(p.storage.get_row("0.0.0@2", ["relay-0#2"])) == {"response_ids"}


def requests_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """The numbers of rows of the client's calls from now on."""
    calls: list[int] = []
    method = getattr(StorageClient, name)

    def counted(self: StorageClient, rows: Collection[str], *rest: object) -> object:
        calls.append(len(rows))
        return method(self, rows, *rest)

    monkeypatch.setattr(StorageClient, name, counted)
    return calls


def test_rows_that_are_ready_together_are_written_and_read_together(cluster: type[Cluster], monkeypatch):
    p = cluster(2)
    puts, gets = requests_of(monkeypatch, "put_many"), requests_of(monkeypatch, "get_many")
    rows = {ref(number, []).key: row(number) for number in range(100)}
    held = p.storage.put_new(rows)
    assert puts == [100, 100] and {*map(frozenset, held.values())} == {frozenset(("relay-0#1", "relay-1#1"))}
    found, reasons = p.storage.get_rows([ref(number, held[key]) for number, key in enumerate(rows)])
    assert gets == [64, 36] and not reasons and list(found) == list(rows)
    for key, columns in rows.items():
        assert {name: value.tolist() for name, value in found[key].items()} == {
            name: value.tolist() for name, value in columns.items()
        }
    puts.clear()
    added = p.storage.add_columns(
        [ref(number, held[key]) for number, key in enumerate(rows)], {key: {"score": np.ones(1)} for key in rows}
    )
    assert puts == [64, 36, 64, 36] and added == held
    found, _ = p.storage.get_rows([ref(7, held["0.0.7@1"])], ["score"])
    assert set(found["0.0.7@1"]) == {"score"}


@pytest.mark.parametrize("trouble", ["a copy is gone", "a copy is damaged", "a unit is dead"])
def test_one_row_that_a_unit_cannot_return_costs_the_others_nothing(cluster: type[Cluster], trouble: str):
    p = cluster(2)
    rows = {ref(number, []).key: row(number) for number in range(8)}
    held = p.storage.put_new(rows)
    p.drop("relay-1#1", "0.0.3@1")
    if trouble == "a copy is gone":
        p.drop("relay-0#1", "0.0.3@1")
        p.drop("relay-0#1", "0.0.5@1")
    elif trouble == "a copy is damaged":
        p.spoil("relay-0#1", "0.0.3@1")
        p.spoil("relay-0#1", "0.0.5@1")
    else:
        p.close("relay-0#1")
    found, reasons = p.storage.get_rows([ref(number, held[key]) for number, key in enumerate(rows)])
    assert set(reasons) == {"0.0.3@1"} and "relay-0#1" in reasons["0.0.3@1"] and "relay-1#1" in reasons["0.0.3@1"]
    assert {key: columns["response_ids"].tolist() for key, columns in found.items()} == {
        key: columns["response_ids"].tolist() for key, columns in rows.items() if key not in reasons
    }


def test_rows_that_do_not_fit_together_go_one_by_one(cluster: type[Cluster], monkeypatch):
    p = cluster(1)
    puts = requests_of(monkeypatch, "put_many")
    put_rows = p.storage.put_rows
    monkeypatch.setattr(p.storage, "put_rows", lambda rows: put_rows(rows) if len(rows) == 1 else refuse())
    held = p.storage.put_new({ref(number, []).key: row(number) for number in range(3)})
    assert puts == [1, 1, 1] and all(units == ["relay-0#1"] for units in held.values())


def refuse() -> list[str]:
    raise StorageFull("no room for all")


def test_a_row_without_a_unit_is_not_found_at_once(cluster: type[Cluster]):
    started = time.monotonic()
    found, reasons = cluster(1).storage.get_rows([ref(0, [])])
    assert not found and "it has no unit" in reasons["0.0.0@1"] and time.monotonic() - started < 2
