"""Mailboxes on a store and in memory: order, signatures, closing, and a store that is gone."""

import subprocess
import sys
import threading
import time

import pytest
from support.closing import at_end
from support.in_memory import MemoryMailboxes

from headrace.comm import mailbox
from headrace.comm.errors import StoreGone
from headrace.comm.mailbox import StoreMailboxes
from headrace.comm.messages import Interrupted, ListStoredRows, Stop
from headrace.comm.signing import MessageSigner
from headrace.comm.store import StoreServer, connect_store
from headrace.comm.waits import waiting

SECRET = b"a secret of the run"
PATIENCE_S = 60.0


class StoreWithMailboxes:
    """A store, and the mailboxes of several processes on it."""

    def __init__(self):
        self.hosted = StoreServer("127.0.0.1")
        self.mailboxes = []

    def open_mailboxes(self, secret=SECRET):
        self.mailboxes.append(StoreMailboxes(connect_store(self.hosted.address, PATIENCE_S), secret).start())
        return self.mailboxes[-1]

    def close(self):
        for mailboxes in self.mailboxes:
            mailboxes.close_inbox("hub", is_last=True)  # the others would wait for the hub to handle their messages
        for mailboxes in self.mailboxes:
            mailboxes.close()


@pytest.fixture
def cluster():
    cluster = StoreWithMailboxes()
    yield cluster
    cluster.close()


@pytest.fixture(params=["store", "memory"])
def mailboxes(request):
    if request.param == "memory":
        yield MemoryMailboxes(SECRET)
        return
    yield request.getfixturevalue("cluster").open_mailboxes()


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
    assert set(threading.enumerate()) == before


def test_a_name_that_is_opened_again_is_accepted_and_its_earlier_messages_arrive(cluster):
    hub = cluster.open_mailboxes().open("hub")
    first = cluster.open_mailboxes()
    first.open("rollout-0").send("hub", Interrupted(signal=1))
    first.close_inbox("rollout-0")
    cluster.open_mailboxes().open("rollout-0").send("hub", Interrupted(signal=2))
    assert [hub.receive(PATIENCE_S).message.signal for _ in range(2)] == [1, 2]
    assert hub.refused == 0


def test_forged_malformed_and_foreign_messages_are_counted_and_dropped(cluster, monkeypatch):
    monkeypatch.setattr(mailbox, "UNCONFIRMED_S", 0.5)  # the hub never confirms what it refuses
    hub, relay = cluster.open_mailboxes().open("hub"), cluster.open_mailboxes().open("relay-0")
    cluster.open_mailboxes(b"another secret").open("rollout-7").send("hub", Stop(reason="forged"))
    raw = connect_store(cluster.hosted.address, PATIENCE_S)
    signer = MessageSigner(SECRET)
    for envelope in (
        b"",
        b"\x80\x04",
        b"[1]\n{}",
        '["x",1,"é"]\nbody'.encode(),
        signer.sign("relay-1", "relay-0", 9, ListStoredRows()),
    ):
        raw.queue_push("inbox/hub#1", envelope)
    raw.queue_push(
        "inbox/hub#1", signer.sign("relay-9", "hub", 1, ListStoredRows()).replace(b"ListStoredRows", b"ListStoredLies")
    )
    raw.add("confirmed", 1)
    relay.send("hub", ListStoredRows())
    assert hub.receive(PATIENCE_S).sender == "relay-0"
    assert hub.receive(0.2) is None
    assert hub.refused == 7


def test_a_flood_of_forged_messages_is_a_few_lines_of_the_log(cluster, caplog):
    hub = cluster.open_mailboxes().open("hub")
    raw = connect_store(cluster.hosted.address, PATIENCE_S)
    for _ in range(150):
        raw.queue_push("inbox/hub#1", b"garbage")
    raw.queue_push("inbox/hub#1", MessageSigner(SECRET).sign("relay-0", "hub", 1, ListStoredRows()))
    assert hub.receive(PATIENCE_S).sender == "relay-0"
    assert hub.refused == 150
    assert [record.args[2] for record in caplog.records if "drops a message" in record.message] == [1, 10, 100]


def test_a_stranger_who_writes_into_the_store_costs_the_hub_no_message(cluster):
    first, sender = cluster.open_mailboxes(), cluster.open_mailboxes()
    hub = first.open("hub")
    raw = connect_store(cluster.hosted.address, PATIENCE_S)
    raw.add("mailbox/epoch/hub", 7)
    for key in ("mailbox/closed", "mailbox/handled/rollout-0", "mailbox/flushed"):
        raw.set(key, str(1 << 62))
    raw.check(["mailbox/closed"])
    rollout = sender.open("rollout-0")
    rollout.send("hub", Interrupted(signal=1))
    assert signals_in(hub, 1) == [1]
    rollout.send("hub", Interrupted(signal=2))
    assert signals_in(hub, 1) == [2]
    first.close_inbox("hub")  # the hub dies while it handles number 2
    hub = cluster.open_mailboxes().open("hub")
    rollout.send("hub", Interrupted(signal=3))
    found = signals_in(hub, 1)
    while found[-1] < 3:
        found += signals_in(hub, 1)
    assert found[-2:] == [2, 3]


def test_a_message_that_arrives_twice_is_accepted_once(cluster):
    hub = cluster.open_mailboxes().open("hub")
    envelope = MessageSigner(SECRET).sign("relay-0", "hub", 1, ListStoredRows())
    raw = connect_store(cluster.hosted.address, PATIENCE_S)
    raw.queue_push("inbox/hub#1", envelope)
    raw.queue_push("inbox/hub#1", envelope)
    assert hub.receive(PATIENCE_S).message == ListStoredRows()
    assert hub.receive(0.2) is None
    assert hub.refused == 1


def test_a_message_too_large_for_the_store_is_refused_at_the_sender(mailboxes):
    with pytest.raises(ValueError, match="at most"):
        mailboxes.open("hub").send("relay-0", Stop(reason="x" * (5 << 20)))


def test_a_mailbox_whose_store_is_gone_raises_an_error_that_names_it():
    store = subprocess.Popen([sys.executable, "-m", "headrace.comm.store"], stdout=subprocess.PIPE, text=True)
    at_end(store.kill)
    assert store.stdout
    address = store.stdout.readline().split()[1]
    mailboxes = StoreMailboxes(connect_store(address, PATIENCE_S), SECRET).start()
    hub = mailboxes.open("hub")
    store.kill()
    store.wait()
    store.stdout.close()
    with pytest.raises(StoreGone, match="hub cannot read"):
        hub.receive(PATIENCE_S)
    mailboxes.close()


@pytest.fixture(params=["store", "memory"])
def processes(request):
    """Mailboxes of a process, as often as the test asks for one."""
    if request.param == "memory":
        shared = MemoryMailboxes(SECRET)
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


def test_a_process_that_leaves_waits_until_the_hub_has_handled_its_messages(cluster):
    first, sender = cluster.open_mailboxes(), cluster.open_mailboxes()
    first.open("hub")
    sender.open("actor-0").send("hub", Interrupted(signal=1))
    leaving = threading.Thread(target=sender.close)
    leaving.start()
    first.close_inbox("hub")
    hub = cluster.open_mailboxes().open("hub")
    assert signals_in(hub, 1) == [1]
    with waiting("the sender", "its end", PATIENCE_S) as wait:
        while leaving.is_alive():
            hub.receive(0.05)
            wait.check()
