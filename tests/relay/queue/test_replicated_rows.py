"""A row is stored in two units and read from either."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from support.in_memory import MemoryFleet, MemoryNetwork

from headrace.comm.messages.base import process_of, storage_id_of
from headrace.comm.storage.client import StorageClient
from headrace.comm.storage.protocol import Locate, Located
from headrace.comm.storage.server import StorageServer
from headrace.relay.queue.replicated_rows import ReplicatedRows, RowNotFound

ROW = {"response_ids": np.arange(5, dtype=np.int32)}


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
    held = p.storage.put_row("0.0.0@1", ROW)
    assert held == ["relay-1#1", "relay-2#1"]
    assert [p.keys(name) for name in sorted(p.hosted)] == [set(), {"0.0.0@1"}, {"0.0.0@1"}]


def test_with_a_single_unit_there_is_one_copy(cluster: type[Cluster]):
    assert cluster(1).storage.put_row("0.0.0@1", ROW) == ["relay-0#1"]


def test_a_row_is_read_from_the_other_copy_when_a_unit_dies_and_the_reason_is_named(
    cluster: type[Cluster], caplog: pytest.LogCaptureFixture
):
    p = cluster(2)
    held = p.storage.put_row("0.0.0@1", ROW)
    p.close(held[0])
    with caplog.at_level(logging.WARNING):
        assert p.storage.get_row("0.0.0@1", held)["response_ids"].tolist() == [0, 1, 2, 3, 4]
    assert held[0] in caplog.text


def test_a_row_that_one_copy_lacks_is_read_from_the_other(cluster: type[Cluster]):
    p = cluster(2)
    held = p.storage.put_row("0.0.0@1", ROW)
    p.drop(held[0], "0.0.0@1")
    assert p.storage.get_row("0.0.0@1", held)["response_ids"].tolist() == [0, 1, 2, 3, 4]


def test_a_row_whose_first_copy_is_damaged_is_read_from_the_other(
    cluster: type[Cluster], caplog: pytest.LogCaptureFixture
):
    p = cluster(2)
    held = p.storage.put_row("0.0.0@1", ROW)
    p.spoil(held[0], "0.0.0@1")
    with caplog.at_level(logging.WARNING):
        assert p.storage.get_row("0.0.0@1", held)["response_ids"].tolist() == [0, 1, 2, 3, 4]
    assert f"{held[0]} failed" in caplog.text
    p.spoil(held[1], "0.0.0@1")
    with pytest.raises(RowNotFound, match=r"relay-1#1: WrongDigest .*relay-0#1: WrongDigest"):
        p.storage.get_row("0.0.0@1", held)


def test_the_error_for_a_row_without_a_copy_gives_each_units_reason(cluster: type[Cluster]):
    p = cluster(2)
    held = p.storage.put_row("0.0.0@1", ROW)
    p.close(held[0])
    p.drop(held[1], "0.0.0@1")
    with pytest.raises(RowNotFound, match=r"relay-1#1: PeerGone .*relay-0#1: KeyError"):
        p.storage.get_row("0.0.0@1", held)


def test_a_restarted_relay_is_another_unit(cluster: type[Cluster]):
    p = cluster(1)
    (old,) = p.storage.put_row("0.0.0@1", ROW)
    p.close(old)
    p.relays[0].crash()
    p.add_relay(0)
    with pytest.raises(RowNotFound):
        p.storage.get_row("0.0.0@1", [old])
    assert p.storage.put_row("0.0.0@2", ROW) == ["relay-0#2"]
    assert process_of("relay-0#2") == process_of(old) == "relay-0"


def test_columns_are_added_to_every_copy_of_a_row_and_to_no_other_row(cluster: type[Cluster]):
    p = cluster(2)
    held = p.storage.put_row("0.0.0@1", ROW)
    p.storage.put_row("0.0.1@1", ROW)
    assert p.storage.add_columns("0.0.0@1", held, {"ref_logprobs": np.ones(5, np.float32)}) == held
    for unit in held:
        assert set(p.storage.get_row("0.0.0@1", [unit])) == {"response_ids", "ref_logprobs"}
        assert set(p.storage.get_row("0.0.1@1", [unit])) == {"response_ids"}
        assert set(p.storage.get_row("0.0.0@1", [unit], ["ref_logprobs"])) == {"ref_logprobs"}


def test_a_write_without_a_living_unit_waits_for_the_next_one(cluster: type[Cluster]):
    p = cluster(1)
    (old,) = p.storage.put_row("0.0.0@1", ROW)
    p.close(old)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(p.storage.put_row, "0.0.1@1", ROW)
        p.relays[0].crash()
        p.add_relay(0)
        assert written.result(60) == ["relay-0#2"]


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
