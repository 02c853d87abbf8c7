"""The failure detector tells each death once."""

import pytest
from support.in_memory import MemoryFleet, MemoryNetwork

from headrace.relay.hub.failure_detector import FailureDetector


class Watched:
    """A detector and the fleet that it watches."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.detector = FailureDetector(self.join("hub"))

    def join(self, role: str) -> MemoryFleet:
        return MemoryFleet.join_network(self.network, role)

    def deaths(self) -> list[tuple[str, int, str]]:
        return [(dead.name, dead.incarnation, reason) for dead, reason in self.detector.deaths()]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_member_that_is_not_alive_any_more_is_dead_and_one_that_the_hub_does_not_watch_is_not(watched: Watched):
    members = [watched.join(role) for role in ("relay", "actor")]
    assert watched.deaths() == []
    for member in members:
        member.crash()
    assert watched.deaths() == [("relay-0", 1, "incarnation 1 is gone")]
    assert watched.deaths() == []
    assert watched.detector.living == {} and watched.detector.seen.keys() == {"hub", "actor-0", "relay-0"}


def test_an_incarnation_is_dead_when_the_next_one_joins(watched: Watched):
    watched.join("rollout")
    assert watched.deaths() == []
    watched.join("rollout")
    assert watched.deaths() == [("rollout-0", 1, "incarnation 1 is gone")]
    assert watched.deaths() == [] and watched.detector.living["rollout-0"].incarnation == 2


def test_a_member_that_joined_and_died_between_two_looks_is_dead_beside_the_one_before(watched: Watched):
    watched.join("relay")
    assert watched.deaths() == []
    watched.join("relay").crash()
    assert watched.deaths() == [("relay-0", 1, "incarnation 1 is gone"), ("relay-0", 2, "incarnation 2 is gone")]
    assert watched.deaths() == []


def test_a_member_that_joins_during_a_look_and_dies_before_the_next_one_is_dead(watched: Watched, monkeypatch):
    joined: list[MemoryFleet] = []
    members = MemoryFleet.members

    def then_one_joins(fleet: MemoryFleet, role: str | None = None):
        found = members(fleet, role)
        if not joined:
            joined.append(watched.join("rollout"))
        return found

    monkeypatch.setattr(MemoryFleet, "members", then_one_joins)
    assert watched.deaths() == []
    joined[0].crash()
    assert watched.deaths() == [("rollout-0", 1, "incarnation 1 is gone")]


def test_a_relay_that_is_back_after_its_unit_was_given_up_is_told_once(watched: Watched):
    watched.join("relay")
    assert watched.detector.survivors({"relay-1#1"}) == []
    lost = {"relay-0#1"}
    assert [relay.name for relay in watched.detector.survivors(lost)] == ["relay-0"]
    assert watched.detector.survivors(lost) == []
    watched.join("relay")
    assert watched.detector.survivors(lost) == []
