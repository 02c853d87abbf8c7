"""The failure detector tells each death once, from whatever report comes first."""

from pathlib import Path

import pytest
from support.in_memory import MemoryFleet, MemoryNetwork

from headrace.comm.messages import ConnectionLost
from headrace.relay.hub.exits import ProcessExit, report_exit
from headrace.relay.hub.failure_detector import FailureDetector


class Watched:
    """A detector and the fleet that it watches."""

    def __init__(self, folder: Path) -> None:
        self.network = MemoryNetwork()
        self.detector = FailureDetector(self.join("hub"), folder)

    def join(self, role: str) -> MemoryFleet:
        return MemoryFleet.join_network(self.network, role)

    def deaths(self) -> list[tuple[str, int, str]]:
        return [(dead.name, dead.incarnation, reason) for dead, reason in self.detector.deaths()]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_a_member_whose_heartbeat_stops_is_dead_and_one_that_the_hub_does_not_watch_is_not(watched: Watched):
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


def test_the_first_report_counts_and_the_next_incarnation_tells_nothing_new(watched: Watched, tmp_path: Path):
    rollout = watched.join("rollout")
    for _ in range(2):
        watched.detector.on_connection_lost(ConnectionLost("rollout-0", 1))
    assert watched.deaths() == [("rollout-0", 1, "the connection of incarnation 1 ended")]
    report_exit(tmp_path, ProcessExit("rollout-0", rollout.me.pid, "it was ended by SIGKILL"))
    assert watched.deaths() == []
    watched.join("rollout")
    assert watched.deaths() == []
    watched.detector.on_connection_lost(ConnectionLost("rollout-0", 2))
    assert watched.deaths() == [("rollout-0", 2, "the connection of incarnation 2 ended")]


def test_a_report_in_error_does_not_hide_the_end_of_the_heartbeat(watched: Watched):
    rollout = watched.join("rollout")
    watched.detector.on_connection_lost(ConnectionLost("rollout-0", 1))
    assert len(watched.deaths()) == 1
    rollout.crash()
    assert watched.deaths() == [("rollout-0", 1, "incarnation 1 is gone")]


def test_a_report_about_another_process_than_the_present_one_is_no_death(watched: Watched, tmp_path: Path):
    rollout = watched.join("rollout")
    for name, incarnation in (("rollout-0", 7), ("rollout-3", 1)):
        watched.detector.on_connection_lost(ConnectionLost(name, incarnation))
    report_exit(tmp_path, ProcessExit("rollout-0", rollout.me.pid + 1, "it was ended by SIGKILL"))
    assert watched.deaths() == [] and watched.detector.broken is None


def test_a_relay_that_is_back_after_its_unit_was_given_up_is_told_once(watched: Watched):
    watched.join("relay")
    assert watched.detector.survivors({"relay-1#1"}) == []
    lost = {"relay-0#1"}
    assert [relay.name for relay in watched.detector.survivors(lost)] == ["relay-0"]
    assert watched.detector.survivors(lost) == []
    watched.join("relay")
    assert watched.detector.survivors(lost) == []
