"""Rows lie in two units, and are read from whichever gives them."""

import logging
from collections.abc import Iterator

import numpy as np
import pytest

from headrace.comm.errors import PeerGone
from headrace.comm.fleet import MemoryFleet, MemoryTown
from headrace.comm.storage.client import RowClient
from headrace.comm.storage.server import RowUnit
from headrace.relay.queue.replicated_rows import RowGone, Units, relay_of, unit_name

ROW = {"response_ids": np.arange(5, dtype=np.int32)}


class Places:
    """Relays with a storage unit each, and somebody who writes and reads."""

    def __init__(self, count: int) -> None:
        self.town = MemoryTown()
        self.hosted: dict[str, RowUnit] = {}
        self.relays = [self.open(index) for index in range(count)]
        self.units = Units(MemoryFleet.enter(self.town, "rollout", 1))

    def open(self, index: int) -> MemoryFleet:
        fleet = MemoryFleet.enter(self.town, "relay", index)
        unit = fleet.host_rows()
        fleet.announce(unit=unit.address)
        self.hosted[unit_name(fleet.me)] = unit
        return fleet

    def close(self, name: str) -> None:
        self.hosted.pop(name).close()

    def keys(self, name: str) -> set[str]:
        client = self.client(name)
        try:
            return set(client.listing())
        finally:
            client.close()

    def client(self, name: str) -> RowClient:
        return self.relays[0].open_rows(self.hosted[name].address)

    def forget(self, name: str, key: str) -> None:
        client = self.client(name)
        assert client.drop([key]) == 1
        client.close()


@pytest.fixture
def places() -> Iterator[type[Places]]:
    made: list[Places] = []

    class Tidy(Places):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            made.append(self)

    yield Tidy
    for each in made:
        each.units.close()
        for name in list(each.hosted):
            each.close(name)
        each.town.post.close()


def test_a_row_is_written_to_two_units_the_nearest_first(places: type[Places]):
    p = places(3)
    held = p.units.store("0.0.0@1", ROW)
    assert held == ["relay-1#1", "relay-2#1"]
    assert [p.keys(name) for name in sorted(p.hosted)] == [set(), {"0.0.0@1"}, {"0.0.0@1"}]


def test_with_a_single_unit_there_is_one_copy(places: type[Places]):
    assert places(1).units.store("0.0.0@1", ROW) == ["relay-0#1"]


def test_a_row_is_read_from_the_other_copy_when_a_unit_dies_and_the_reason_is_named(
    places: type[Places], caplog: pytest.LogCaptureFixture
):
    p = places(2)
    held = p.units.store("0.0.0@1", ROW)
    p.close(held[0])
    with caplog.at_level(logging.WARNING):
        assert p.units.fetch("0.0.0@1", held)["response_ids"].tolist() == [0, 1, 2, 3, 4]
    assert held[0] in caplog.text


def test_a_row_that_one_copy_lacks_is_read_from_the_other(places: type[Places]):
    p = places(2)
    held = p.units.store("0.0.0@1", ROW)
    p.forget(held[0], "0.0.0@1")
    assert p.units.fetch("0.0.0@1", held)["response_ids"].tolist() == [0, 1, 2, 3, 4]


def test_a_row_without_any_copy_is_gone_and_each_reason_is_told(places: type[Places]):
    p = places(2)
    held = p.units.store("0.0.0@1", ROW)
    p.close(held[0])
    p.forget(held[1], "0.0.0@1")
    with pytest.raises(RowGone, match=r"relay-1#1: PeerGone .*relay-0#1: KeyError"):
        p.units.fetch("0.0.0@1", held)


def test_a_relay_that_came_back_is_another_unit(places: type[Places]):
    p = places(1)
    (old,) = p.units.store("0.0.0@1", ROW)
    p.close(old)
    p.relays[0].vanish()
    p.open(0)
    with pytest.raises(RowGone):
        p.units.fetch("0.0.0@1", [old])
    assert p.units.store("0.0.0@2", ROW) == ["relay-0#2"]
    assert relay_of("relay-0#2") == relay_of(old) == "relay-0"


def test_columns_are_added_to_every_copy_and_nothing_else_is_touched(places: type[Places]):
    p = places(2)
    held = p.units.store("0.0.0@1", ROW)
    p.units.store("0.0.1@1", ROW)
    assert p.units.add("0.0.0@1", held, {"ref_logprobs": np.ones(5, np.float32)}) == held
    for unit in held:
        assert set(p.units.fetch("0.0.0@1", [unit])) == {"response_ids", "ref_logprobs"}
        assert set(p.units.fetch("0.0.1@1", [unit])) == {"response_ids"}
        assert set(p.units.fetch("0.0.0@1", [unit], ["ref_logprobs"])) == {"ref_logprobs"}


def test_where_nobody_takes_a_row_the_writer_is_told(places: type[Places]):
    p = places(2)
    for name in p.units.store("0.0.0@1", ROW):
        p.close(name)
    with pytest.raises(PeerGone, match=r"0\.0\.1@1"):
        p.units.store("0.0.1@1", ROW)
