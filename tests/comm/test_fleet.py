"""Membership on a store and in memory, and the ends of processes that lose their store."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from support.closing import at_end
from support.in_memory import MemoryFleet, MemoryNetwork

from headrace.comm.environment import RUN_ID
from headrace.comm.errors import STORE_LOST_EXIT, WaitTimeout
from headrace.comm.fleet import StoreFleet
from headrace.comm.messages import ListStoredRows
from headrace.comm.recipe import CommSettings
from headrace.comm.store.protocol import Beat
from headrace.comm.store.server import StoreServer
from headrace.comm.store.state import StoreState
from headrace.comm.waits import waiting

SECRET = b"a secret of the run"
PATIENCE_S = 240.0
QUICK = CommSettings(expiry_s=PATIENCE_S, deadline_s=PATIENCE_S)
MORTAL = CommSettings(expiry_s=2.0, deadline_s=PATIENCE_S)
"""For tests of a member that dies. A process whose store is silent for three times as long ends itself."""


class StoreCluster:
    """Members of one test on a store."""

    def __init__(self):
        self.server = StoreServer("127.0.0.1", SECRET).start()
        self.fleets = []
        at_end(self.close)

    def join(self, role, index=0, info=None):
        self.fleets.append(StoreFleet.join(self.server.address, role, index, SECRET, info or {}, QUICK))
        return self.fleets[-1]

    def close(self):
        for fleet in self.fleets:
            fleet.leave()
        self.server.close()


class MemoryCluster:
    """Members of one test in memory."""

    def __init__(self):
        self.network = MemoryNetwork()

    def join(self, role, index=0, info=None):
        return MemoryFleet.join_network(self.network, role, index, info, QUICK)

    def close(self):
        pass


@pytest.fixture(params=[StoreCluster, MemoryCluster])
def cluster(request):
    cluster = request.param()
    yield cluster
    cluster.close()


def until(ready):
    with waiting("the fleet", "a change", deadline_s=PATIENCE_S) as wait:
        return wait.until(ready)


def names(fleet, role=None):
    return [member.name for member in fleet.members(role)]


def test_members_see_each_other_by_role_and_index(cluster):
    hub = cluster.join("hub")
    cluster.join("rollout", 1, {"unit": "here"})
    cluster.join("rollout", 0)
    assert [m.name for m in hub.wait_for("rollout", 2, PATIENCE_S)] == ["rollout-0", "rollout-1"]
    assert hub.name == "hub"
    assert hub.members("rollout")[1].info == {"unit": "here"}


def test_waiting_for_members_that_do_not_come_names_them(cluster):
    with pytest.raises(WaitTimeout, match="2 x relay"):
        cluster.join("hub").wait_for("relay", 2, deadline_s=0.1)


def test_the_others_see_what_a_member_announces_later(cluster):
    rollout, relay = cluster.join("rollout"), cluster.join("relay")
    assert rollout.alive_members("relay", having="unit") == []
    relay.announce(unit="127.0.0.1:1")
    assert rollout.nearest("relay", having="unit").info["unit"] == "127.0.0.1:1"


def test_the_index_of_a_member_chooses_among_several_nearest_ones(cluster):
    rollouts = [cluster.join("rollout", index) for index in range(4)]
    for index in range(2):
        cluster.join("relay", index)
    rollouts[-1].wait_for("relay", 2, PATIENCE_S)
    assert until(lambda: [r.nearest("relay").index for r in rollouts] == [0, 1, 0, 1])


def test_a_member_that_has_left_is_not_listed(cluster):
    hub, relay = cluster.join("hub"), cluster.join("relay")
    hub.wait_for("relay", 1, PATIENCE_S)
    relay.leave()
    relay.leave()
    assert until(lambda: names(hub) == ["hub"])


def test_a_member_that_joins_again_is_the_next_incarnation(cluster):
    hub, first = cluster.join("hub"), cluster.join("relay")
    assert first.incarnation == 1
    first.leave()
    second = cluster.join("relay")
    assert second.incarnation == 2
    assert until(lambda: [m.incarnation for m in hub.members("relay")] == [2])


def test_leaving_delivers_all_messages_and_leaves_no_thread():
    cluster = StoreCluster()
    receiver = cluster.join("relay").open_mailbox("relay-0")
    before = set(threading.enumerate())
    hub = cluster.join("hub")
    mailbox = hub.open_mailbox("hub")
    for _ in range(100):
        mailbox.send("relay-0", ListStoredRows())
    hub.leave()
    assert set(threading.enumerate()) == before
    assert all(receiver.receive(PATIENCE_S) is not None for _ in range(100))
    cluster.close()


def test_links_are_opened_by_name(cluster):
    import numpy as np

    relay, rollout = cluster.join("relay"), cluster.join("rollout")
    ends = {}
    other = threading.Thread(target=lambda: ends.setdefault(1, rollout.open_link("weights", 1, PATIENCE_S)))
    other.start()
    ends[0] = relay.open_link("weights", 0, PATIENCE_S)
    other.join()
    received = np.zeros(3, np.uint8)
    ends[0].send(np.arange(3, dtype=np.uint8), PATIENCE_S)
    ends[1].receive(received, PATIENCE_S)
    assert received.tolist() == [0, 1, 2]
    for link in ends.values():
        link.close()


MEMBER = """
import sys, time
from headrace.comm.fleet import StoreFleet
from headrace.comm.recipe import CommSettings
fleet = StoreFleet.join(sys.argv[1], "rollout", 3, b"", {}, CommSettings(expiry_s=float(sys.argv[3])))
print("joined", flush=True)
sys.stdin.readline()
if sys.argv[2] == "leave":
    fleet.leave()
time.sleep(600 if sys.argv[2] == "stay" else 0)
"""


class Processes:
    """A store and members in processes of their own."""

    def __init__(self):
        self.started = []
        at_end(self.close)
        self.store = self.start("-m", "headrace.comm.store", "--silence-s", "4")
        self.address = self.store.stdout.readline().split()[1]

    def start(self, *arguments):
        pipe = subprocess.PIPE
        self.started.append(
            subprocess.Popen([sys.executable, *arguments], text=True, stdin=pipe, stdout=pipe, stderr=pipe)
        )
        return self.started[-1]

    def member(self, ending, expiry_s=PATIENCE_S):
        member = self.start("-c", MEMBER, self.address, ending, str(expiry_s))
        assert member.stdout.readline() == "joined\n"
        return member

    def close(self):
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def processes():
    processes = Processes()
    yield processes
    processes.close()


def test_a_process_whose_store_dies_ends_with_a_named_error(processes):
    member = processes.member("stay")
    processes.store.kill()
    assert member.wait(PATIENCE_S) == STORE_LOST_EXIT
    assert "StoreGone: rollout-3: the run's store at 127.0.0.1:" in member.stderr.read()


def test_a_process_whose_store_is_frozen_ends_with_a_named_error(processes):
    member = processes.member("stay", expiry_s=1.0)
    os.kill(processes.store.pid, signal.SIGSTOP)
    assert member.wait(PATIENCE_S) == STORE_LOST_EXIT
    assert "has not answered" in member.stderr.read()


def test_a_process_that_was_stopped_itself_is_a_member_again_when_it_continues(processes):
    member = processes.member("stay", expiry_s=0.5)
    hub = StoreFleet.join(processes.address, "hub", 0, b"", {}, MORTAL)
    hub.wait_for("rollout", 1, PATIENCE_S)
    os.kill(member.pid, signal.SIGSTOP)
    assert until(
        lambda: not hub.members("rollout")[0].is_alive
    )  # after more time than the member's watchdog grants a store
    os.kill(member.pid, signal.SIGCONT)
    assert until(lambda: hub.members("rollout")[0].is_alive)
    hub.leave()
    assert member.poll() is None


def test_the_store_ends_without_output_after_the_last_member_left(processes):
    member = processes.member("leave")
    member.stdin.write("\n")
    member.stdin.flush()
    assert member.wait(PATIENCE_S) == 0
    assert processes.store.wait(PATIENCE_S) == 0
    assert processes.store.stderr.read() == member.stderr.read() == ""


def test_the_store_does_not_wait_for_the_dead_and_ignores_signals_to_all_processes(processes):
    member = processes.member("stay")
    processes.store.send_signal(signal.SIGINT)
    processes.store.send_signal(signal.SIGTERM)
    hub = StoreFleet.join(processes.address, "hub", 0, b"", {}, MORTAL)
    hub.wait_for("rollout", 1, PATIENCE_S)
    member.kill()
    assert until(lambda: not hub.members("rollout")[0].is_alive)
    hub.leave()
    assert processes.store.wait(PATIENCE_S) == 0


def test_a_store_ends_on_sigquit(processes):
    processes.store.send_signal(signal.SIGQUIT)
    assert processes.store.wait(PATIENCE_S) == 0


def test_a_lost_store_is_told_once():
    errors = []
    server = StoreServer("127.0.0.1", SECRET).start()
    fleet = StoreFleet.join(server.address, "relay", 0, SECRET, {}, QUICK, on_store_gone=errors.append)
    at_end(fleet.leave)
    server.close()
    assert until(lambda: errors)
    assert "relay-0" in str(errors[0])
    fleet.leave()
    assert len(errors) == 1


def test_the_runs_number_is_that_of_its_start(monkeypatch):
    cluster = StoreCluster()
    before = [cluster.join("hub").run_id, cluster.join("relay").run_id]
    assert before[0] == before[1]
    monkeypatch.setenv(RUN_ID, "of the next start")
    assert cluster.join("rollout").run_id != before[0]


@pytest.mark.parametrize(("expiry_s", "is_frequent"), [(2.0, True), (600.0, False)])
def test_a_member_beats_ten_times_before_it_expires(monkeypatch, expiry_s, is_frequent):
    beats = []
    handle = StoreState.handle

    def counting(state, client, request, now):
        if isinstance(request, Beat):
            beats.append(now)
        handle(state, client, request, now)

    monkeypatch.setattr(StoreState, "handle", counting)
    hosted = StoreServer("127.0.0.1", SECRET).start()
    at_end(hosted.close)
    settings = CommSettings(expiry_s=expiry_s, deadline_s=PATIENCE_S)
    fleet = StoreFleet.join(hosted.address, "rollout", 0, SECRET, {}, settings)
    if is_frequent:
        until(lambda: len(beats) > 5)
    else:
        time.sleep(0.5)
        assert not beats
    fleet.leave()
