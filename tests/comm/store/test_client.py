"""A process's connection to the store: values, waits, and a store that has ended or is not there yet."""

import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.closing import at_end

from headrace.comm.errors import SettingError, StoreGone, WaitTimeout
from headrace.comm.links.tls import TlsIdentity
from headrace.comm.store.client import StoreClient
from headrace.comm.store.protocol import Delivery, OpenInbox, Post
from headrace.comm.store.server import StoreServer

SECRET = b"a secret of the run"
PATIENCE_S = 60.0


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def server(request):
    server = StoreServer("127.0.0.1", SECRET, tls=TlsIdentity() if request.param else None).start()
    at_end(server.close)
    return server


def connect(server: StoreServer) -> StoreClient:
    client = StoreClient.connect(server.address, SECRET, PATIENCE_S)
    at_end(client.close)
    return client


def test_a_value_is_read_without_waiting_for_it_and_an_empty_one_is_a_value(server):
    client = connect(server)
    assert client.get("absent") is None
    client.set("present", b"\x00\xffbytes")
    client.set("empty", b"")
    assert connect(server).get("present") == b"\x00\xffbytes"
    assert client.get("empty") == b""
    client.delete("present")
    assert client.get("present") is None


def test_a_value_is_awaited_until_another_process_sets_it_or_the_deadline_passes(server):
    first, second = connect(server), connect(server)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.wait_for, "key", PATIENCE_S)
        second.set("key", b"value")
        assert waiting.result(PATIENCE_S) == b"value"
    with pytest.raises(WaitTimeout, match="GetValue"):
        first.wait_for("another", 0.1)
    assert first.get("key") == b"value"


def test_numbers_are_taken_once(server):
    clients = [connect(server) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(lambda n: clients[n % 4].add("taken", 1), range(200)))
    assert sorted(sums) == list(range(1, 201))


def test_messages_of_a_megabyte_arrive_whole_and_in_order(server):
    reader, sender = connect(server), connect(server)
    arrived: list[Delivery] = []
    has_all = threading.Event()

    def take(delivery: Delivery) -> None:
        arrived.append(delivery)
        if len(arrived) == 20:
            has_all.set()

    reader.on_delivery["relay-0"] = take
    reader.ask(lambda number: OpenInbox(number, "relay-0"))
    for sequence in range(20):
        sender.tell(Post("relay-0", "hub", sequence, bytes([sequence]) * (1 << 20)))
    assert has_all.wait(PATIENCE_S)
    assert [(each.sequence, each.body) for each in arrived] == [(n, bytes([n]) * (1 << 20)) for n in range(20)]


def test_what_was_queued_before_the_close_has_arrived(server):
    client = connect(server)
    for sequence in range(1000):
        client.tell(Post("relay-0", "hub", sequence, b"x" * 1000))
    client.close()
    client.close()
    reader = connect(server)
    found: list[int] = []
    reader.on_delivery["relay-0"] = lambda delivery: found.append(delivery.sequence)
    reader.ask(lambda number: OpenInbox(number, "relay-0"))
    reader.sync()
    assert found == list(range(1000))


def test_the_end_of_the_store_is_told_once_and_wakes_those_who_wait(server):
    client, told = connect(server), []
    client.on_gone = told.append
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait_for, "key", PATIENCE_S)
        client.sync()
        server.close()
        with pytest.raises(StoreGone, match="the run's store at"):
            waiting.result(PATIENCE_S)
    with pytest.raises(StoreGone):
        client.set("key", b"value")
    assert len(told) == 1


def test_a_store_that_has_nothing_to_say_to_a_busy_client_is_not_silent(server):
    """Messages have no answer, so heartbeats go on between them."""
    client = StoreClient.connect(server.address, SECRET, PATIENCE_S, heartbeat_s=0.3, patience_s=2.0)
    at_end(client.close)
    began = time.monotonic()
    for sequence in itertools.takewhile(lambda _: time.monotonic() - began < 4.0, itertools.count()):
        client.tell(Post("relay-0", "hub", sequence, b""))
        time.sleep(0.05)
    assert client.gone is None


def test_a_connection_leaves_no_thread(server):
    before = set(threading.enumerate())
    client = connect(server)
    client.set("key", b"value")
    client.close()
    assert set(threading.enumerate()) == before


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_a_store_that_has_ended_is_gone_at_once():
    with pytest.raises(StoreGone, match="no store answers"):
        StoreClient.connect(f"127.0.0.1:{free_port()}", SECRET, deadline_s=1e9)


def test_a_store_that_is_not_started_yet_is_awaited():
    port = free_port()
    started: list[StoreServer] = []
    timer = threading.Timer(0.3, lambda: started.append(StoreServer("127.0.0.1", SECRET, port).start()))
    timer.start()
    client = StoreClient.connect(f"127.0.0.1:{port}", SECRET, PATIENCE_S, is_started=False)
    timer.join()
    at_end(started[0].close)
    at_end(client.close)
    client.set("key", b"value")
    assert client.get("key") == b"value"


def test_what_is_no_address_is_a_mistake_of_the_user():
    with pytest.raises(SettingError, match="HEADRACE_STORE"):
        StoreClient.connect("somewhere", SECRET, 1.0)
