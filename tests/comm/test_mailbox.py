"""Mailboxes on a store and in memory: order, what is refused, closing, and a store that is gone."""

import subprocess
import sys
import threading
import time

import pytest
from support.closing import at_end
from support.in_memory import MemoryMailboxes

from headrace.comm.errors import StoreGone
from headrace.comm.mailbox import StoreMailboxes
from headrace.comm.messages import Interrupted, ListStoredRows, Stop
from headrace.comm.messages.codec import encode
from headrace.comm.store.client import StoreClient
from headrace.comm.store.protocol import Post
from headrace.comm.store.server import StoreServer

SECRET = b"a secret of the run"
PATIENCE_S = 60.0


class StoreWithMailboxes:
    """A store, and the mailboxes of several processes on it."""

    def __init__(self):
        self.server = StoreServer("127.0.0.1", SECRET).start()
        self.clients = []

    def connect(self):
        self.clients.append(StoreClient.connect(self.server.address, SECRET, PATIENCE_S))
        return self.clients[-1]

    def open_mailboxes(self):
        return StoreMailboxes(self.connect())

    def kill(self):
        """End the connection of the process that was opened last."""
        self.clients[-1].close()

    def close(self):
        for client in self.clients:
            client.close()
        self.server.close()


@pytest.fixture
def cluster():
    cluster = StoreWithMailboxes()
    yield cluster
    cluster.close()


@pytest.fixture(params=["store", "memory"])
def mailboxes(request):
    if request.param == "memory":
        return MemoryMailboxes()
    return request.getfixturevalue("cluster").open_mailboxes()


def test_messages_of_one_sender_arrive_in_order(mailboxes):
    hub, relay = mailboxes.open("hub"), mailboxes.open("relay-0")
    for count in range(200):
        relay.send("hub", Interrupted(signal=count))
    envelopes = [hub.receive(PATIENCE_S) for _ in range(200)]
    assert [envelope.message.signal for envelope in envelopes] == list(range(200))
    assert {envelope.sender for envelope in envelopes} == {"relay-0"}


def test_a_message_may_be_sent_before_its_inbox_is_open(mailboxes):
    mailboxes.open("hub").send("rollout-0", Stop(reason="done"))
    assert mailboxes.open("rollout-0").receive(PATIENCE_S).message == Stop(reason="done")


def test_polling_an_empty_inbox_returns_at_once(mailboxes):
    assert mailboxes.open("hub").receive(0) is None


def test_messages_sent_before_the_close_are_delivered(cluster):
    sender = cluster.open_mailboxes()
    relay = sender.open("relay-0")
    for count in range(500):
        relay.send("hub", Interrupted(signal=count))
    sender.close()
    cluster.kill()
    hub = cluster.open_mailboxes().open("hub")
    assert [hub.receive(PATIENCE_S).message.signal for _ in range(500)] == list(range(500))


def test_closing_twice_is_allowed_and_leaves_no_thread(cluster):
    before = set(threading.enumerate())
    mailboxes = cluster.open_mailboxes()
    mailbox = mailboxes.open("hub")
    mailbox.close()
    mailbox.close()
    mailboxes.close()
    mailboxes.close()
    cluster.kill()
    assert set(threading.enumerate()) == before


def test_a_name_that_is_opened_again_is_accepted_and_its_earlier_messages_arrive(cluster):
    hub = cluster.open_mailboxes().open("hub")
    first = cluster.open_mailboxes()
    first.open("rollout-0").send("hub", Interrupted(signal=1))
    first.close_inbox("rollout-0")
    first.close()
    cluster.open_mailboxes().open("rollout-0").send("hub", Interrupted(signal=2))
    assert [hub.receive(PATIENCE_S).message.signal for _ in range(2)] == [1, 2]
    assert hub.refused == 0


def test_malformed_messages_and_those_seen_before_are_dropped_with_a_few_lines_of_the_log(cluster, caplog):
    hub, raw = cluster.open_mailboxes().open("hub"), cluster.connect()
    body = encode(ListStoredRows())
    for sequence, content in enumerate([b"", b"\x80\x04", b"{}", body.replace(b"StoredRows", b"StoredLies")], start=1):
        raw.tell(Post("hub", "relay-9", sequence, content))
    raw.tell(Post("hub", "relay-0", 7, body))
    for _ in range(146):
        raw.tell(Post("hub", "relay-0", 7, body))
    raw.tell(Post("hub", "relay-1", 1, body))
    assert [hub.receive(PATIENCE_S).sender for _ in range(2)] == ["relay-0", "relay-1"]
    assert hub.receive(0.1) is None
    assert hub.refused == 150
    assert [record.args[2] for record in caplog.records if "drops a message" in record.message] == [1, 10, 100]


def test_a_message_too_large_for_the_store_is_refused_at_the_sender(mailboxes):
    with pytest.raises(ValueError, match="at most"):
        mailboxes.open("hub").send("relay-0", Stop(reason="x" * (5 << 20)))


def test_a_mailbox_whose_store_is_gone_raises_an_error_that_names_it():
    store = subprocess.Popen([sys.executable, "-m", "headrace.comm.store"], stdout=subprocess.PIPE, text=True)
    at_end(store.kill)
    assert store.stdout
    client = StoreClient.connect(store.stdout.readline().split()[1], b"", PATIENCE_S)
    at_end(client.close)
    mailboxes = StoreMailboxes(client)
    hub = mailboxes.open("hub")
    store.kill()
    store.wait()
    store.stdout.close()
    with pytest.raises(StoreGone, match="hub cannot read"):
        hub.receive(PATIENCE_S)
    with pytest.raises(StoreGone, match="hub cannot write to relay-0"):
        hub.send("relay-0", ListStoredRows())
    mailboxes.close()


@pytest.fixture(params=["store", "memory"])
def processes(request):
    """Mailboxes of a process, as often as the test asks for one."""
    if request.param == "memory":
        shared = MemoryMailboxes()
        return lambda: shared
    return request.getfixturevalue("cluster").open_mailboxes


def signals_in(hub, count):
    return [hub.receive(PATIENCE_S).message.signal for _ in range(count)]


def test_the_next_process_of_the_hub_gets_what_the_one_before_did_not_handle_in_order(processes):
    first, sender = processes(), processes()
    hub, rollout = first.open("hub"), sender.open("rollout-0")
    for count in range(6):
        rollout.send("hub", Interrupted(signal=count))
    assert signals_in(hub, 4) == [0, 1, 2, 3]  # the hub dies while it handles number 3
    first.close_inbox("hub")
    rollout.send("hub", Interrupted(signal=6))
    hub = processes().open("hub")
    rollout.send("hub", Interrupted(signal=7))
    found = signals_in(hub, 1)
    while found[-1] < 7:
        found += signals_in(hub, 1)
    assert found == list(range(found[0], 8)) and found[0] <= 3


def test_the_next_process_of_the_hub_does_not_get_what_was_confirmed(processes):
    first, sender = processes(), processes()
    hub, rollout = first.open("hub"), sender.open("rollout-0")
    for count in range(3):
        rollout.send("hub", Interrupted(signal=count))
    assert signals_in(hub, 3) == [0, 1, 2]
    time.sleep(0.11)  # the hub confirms at most ten times a second
    assert hub.receive(0) is None
    first.close_inbox("hub")
    first.close()
    hub = processes().open("hub")
    rollout.send("hub", Interrupted(signal=3))
    assert signals_in(hub, 1) == [3]


def test_messages_of_a_process_that_died_since_reach_the_next_process_of_the_hub(cluster):
    first = cluster.open_mailboxes()
    first.open("hub")
    rollout = cluster.open_mailboxes().open("rollout-0")
    rollout.send("hub", Interrupted(signal=1))
    cluster.kill()
    first.close_inbox("hub")
    assert signals_in(cluster.open_mailboxes().open("hub"), 1) == [1]
