"""A storage unit and its client: rows come back as they were put, over memory and over the connection."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.in_memory_storage import MemoryRows

from headrace.comm.errors import PeerGone, StorageFull, WrongDigest
from headrace.comm.storage.client import StorageClient
from headrace.comm.storage.protocol import (
    Ack,
    Commit,
    Listing,
    Locate,
    Located,
    Reserve,
    Reserved,
)
from headrace.comm.storage.server import StorageServer
from headrace.comm.waits import waiting


@pytest.fixture
def unit():
    unit = StorageServer("127.0.0.1", b"secret").start()
    yield unit
    unit.close()


@pytest.fixture
def client(unit):
    client = StorageClient(unit.address, b"secret")
    yield client
    client.drop(client.listing())
    client.close()


@pytest.fixture(params=["through memory", "over the connection", "twin"])
def rows(request):
    if request.param == "twin":
        yield MemoryRows()
        return
    unit = request.getfixturevalue("unit")
    client = StorageClient(unit.address, b"secret", through_memory=request.param == "through memory")
    yield client
    client.drop(client.listing())
    client.close()


def row(seed, num_tokens=50):
    random = np.random.default_rng(seed)
    return {
        "loss_mask": random.integers(0, 2, num_tokens).astype(np.uint8),
        "token_ids": random.integers(0, 1000, num_tokens),
        "logprobs": random.standard_normal(num_tokens).astype(np.float32),
        "empty": np.zeros(0, np.int32),
    }


def num_bytes(columns):
    return sum(column.nbytes for column in columns.values())


def assert_same(read, written):
    assert read.keys() == written.keys()
    for name, column in written.items():
        assert read[name].dtype == column.dtype
        assert read[name].shape == column.shape
        assert read[name].tobytes() == column.tobytes()


def test_a_row_comes_back_as_it_was_put(rows):
    assert rows.put("0.1.2", row(1)) == num_bytes(row(1))
    assert_same(rows.get("0.1.2"), row(1))


@pytest.mark.parametrize("dtype", ["<f2", ">i4", "?", "<c16", "<U7", "S3", "V2", "<M8[ns]"])
def test_any_plain_type_comes_back_with_its_shape(rows, dtype):
    raw = np.random.default_rng(0).integers(0, 2, 2 * 3 * 64).astype(np.uint8)
    size = np.dtype(dtype).itemsize
    column = np.frombuffer(raw[: 6 * size].tobytes(), dtype).reshape(2, 3)
    rows.put("typed", {"column": column, "odd": np.zeros(3, np.uint8), "scalar": np.array(2.5)})
    assert_same(rows.get("typed", ["column", "scalar"]), {"column": column, "scalar": np.array(2.5)})


def test_a_column_that_needs_pickling_is_refused(rows):
    for column in (np.array([{}]), np.zeros(2, [("a", "i4")])):
        with pytest.raises(ValueError, match="column bad"):
            rows.put("objects", {"bad": column})
    assert len(rows.listing()) == 0


def test_a_column_that_is_a_view_is_stored_as_it_appears(rows):
    table = np.arange(12).reshape(3, 4)
    rows.put("view", {"strided": table[:, ::2], "turned": table.T})
    assert_same(rows.get("view"), {"strided": table[:, ::2].copy(), "turned": table.T.copy()})


def test_a_row_or_column_that_is_not_there_is_a_key_error(rows):
    rows.put("wide", row(1))
    for keys, columns in ((["absent"], None), (["wide"], ["absent"]), (["wide", "absent"], ["token_ids"])):
        with pytest.raises(KeyError, match="absent"):
            rows.get_many(keys, columns)


def test_later_columns_add_to_a_row(rows):
    rows.put("grows", row(1))
    rows.put("grows", {"reward": np.array([0.5], np.float32)})
    assert_same(rows.get("grows"), row(1) | {"reward": np.array([0.5], np.float32)})
    assert_same(
        rows.get("grows", ["reward", "logprobs"]), {"logprobs": row(1)["logprobs"], "reward": np.array([0.5], "f4")}
    )
    assert len(rows.listing()) == 1


def test_putting_again_replaces_columns_and_counts_once(rows):
    for _ in range(3):
        rows.put("again", row(1))
    rows.put("again", {"token_ids": row(2, 70)["token_ids"]})
    assert len(rows.listing()) == 1
    assert_same(rows.get("again"), row(1) | {"token_ids": row(2, 70)["token_ids"]})


def test_many_rows_of_many_lengths_go_at_once(rows):
    written = {f"{i}": row(i, num_tokens=7 * i) for i in range(40)}
    assert rows.put_many(written) == sum(map(num_bytes, written.values()))
    rows.put_many({key: {"reward": np.array([float(key)])} for key in written})
    assert set(rows.listing()) == written.keys()
    assert rows.get("3").keys() == {*row(3), "reward"}
    read = rows.get_many(reversed(written), ["token_ids", "reward"])
    for key, columns in read.items():
        assert_same(columns, {"token_ids": written[key]["token_ids"], "reward": np.array([float(key)])})


def test_a_row_of_many_megabytes_comes_back(rows):
    large = row(3, num_tokens=1_500_000)
    rows.put("large", large)
    assert_same(rows.get("large"), large)


def test_dropping_returns_how_many_rows_the_unit_held_and_may_be_repeated(rows):
    for key in "abc":
        rows.put(key, row(ord(key)))
    assert rows.drop(["a", "b", "z"]) == 2
    assert rows.drop(["a", "b", "z"]) == 0
    assert len(rows.listing()) == 1
    assert_same(rows.get("c"), row(ord("c")))


def test_columns_that_were_read_belong_to_the_reader(rows):
    rows.put("own", row(1))
    read = rows.get("own")
    read["token_ids"][:] = -1
    assert_same(rows.get("own"), row(1))


@given(
    steps=st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["put", "add", "drop"]), st.integers(0, 3000)), max_size=30
    )
)
def test_a_unit_and_its_twin_hold_the_same_after_any_sequence(steps):
    unit = StorageServer("127.0.0.1", b"secret").start()
    client, twin = StorageClient(unit.address, b"secret"), MemoryRows()
    for number, (key, what, size) in enumerate(steps):
        for rows in (client, twin):
            match what:
                case "put":
                    rows.put(key, row(number, size))
                case "add":
                    rows.put(key, {"logprobs": np.full(size, number, np.float32)})
                case "drop":
                    rows.drop([key])
    assert set(client.listing()) == set(twin.listing())
    for key in twin.listing():
        assert_same(client.get(key), twin.get(key))
    client.drop("abc")
    assert unit.arena.num_bytes == 0
    client.close()
    unit.close()


def test_no_column_is_lost_when_many_writers_add_to_one_row(unit, client):
    """Reading, changing and writing back would lose updates; the unit merges under one lock."""

    def add(worker):
        mine = StorageClient(unit.address, b"secret")
        for step in range(25):
            mine.put("shared", {f"{worker}.{step}": np.full(step, worker)})
        mine.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(8)))
    read = client.get("shared")
    assert len(read) == 200
    assert all(np.array_equal(read[f"{w}.{s}"], np.full(s, w)) for w in range(8) for s in range(25))


def test_units_share_nothing(unit, client):
    other = StorageServer("127.0.0.1").start()
    its_client = StorageClient(other.address)
    client.put("same key", row(1))
    assert len(its_client.listing()) == 0
    its_client.put("same key", row(2))
    client.drop(["same key"])
    assert_same(its_client.get("same key"), row(2))
    its_client.close()
    other.close()


def test_a_reader_never_gets_the_bytes_of_a_row_that_replaced_a_dropped_one(unit, client):
    """The digest shows that the memory was reused during the read; the reader asks again."""
    written, stop = {i: row(i, 20_000) for i in range(4)}, threading.Event()

    def churn():
        mine, number = StorageClient(unit.address, b"secret"), 0
        while not stop.is_set():
            mine.drop(["churned"])
            mine.put("churned", written[number % 4])
            number += 1
        mine.close()

    with ThreadPoolExecutor(1) as pool:
        churning = pool.submit(churn)
        seen = 0
        try:
            while seen < 100 and not churning.done():
                with contextlib.suppress(KeyError):
                    read = client.get("churned")
                    which = [i for i, row in written.items() if np.array_equal(row["token_ids"], read["token_ids"])]
                    assert_same(read, written[which[0]])
                    seen += 1
        finally:
            stop.set()
        churning.result()


def test_memory_is_not_reused_before_its_row_is_dropped(unit, client):
    client.put("first", row(1, 5000))
    place = client._ask(Locate(["first"], None, False), Located).rows[0][0].offset
    client.put("second", row(2, 5000))
    assert client._ask(Locate(["second"], None, False), Located).rows[0][0].offset != place
    client.drop(["first"])
    client.put("third", row(3, 5000))
    assert client._ask(Locate(["third"], None, False), Located).rows[0][0].offset == place
    assert_same(client.get("second"), row(2, 5000))


def test_bytes_that_do_not_match_their_digest_are_refused(unit, client):
    client.put("torn", row(1))
    (block,) = client._ask(Locate(["torn"], ["token_ids"], False), Located).rows[0]
    unit.arena.write(block.offset + block.columns[0].start, [np.zeros(1, np.uint8) + 255])
    with pytest.raises(WrongDigest, match="torn"):
        client.get("torn")
    assert_same(client.get("torn", ["logprobs"]), {"logprobs": row(1)["logprobs"]})


def test_a_row_that_is_damaged_on_the_connection_is_refused_and_takes_no_memory(unit, monkeypatch):
    sender = StorageClient(unit.address, b"secret", through_memory=False)
    send = sender._link.send

    def truncate(buffer, deadline_s):
        is_body = buffer.nbytes == row(1)["token_ids"].nbytes
        send(np.concatenate([buffer[:-8], np.zeros(8, np.uint8)]) if is_body else buffer, deadline_s)

    monkeypatch.setattr(sender._link, "send", truncate)
    with pytest.raises(WrongDigest, match="token_ids"):
        sender.put("short", {"token_ids": np.arange(1, 51)})
    assert len(sender.listing()) == 0
    assert unit.arena.num_bytes == 0
    sender.close()


def test_a_client_cannot_commit_what_it_has_not_reserved(client):
    client.put("mine", row(1))
    (block,) = client._ask(Locate(["mine"], None, False), Located).rows[0]
    with pytest.raises(WrongDigest, match="not reserved"):
        client._ask(Commit(["theirs"], [msgspec.structs.replace(block, serial=block.serial + 1)], False), Ack)
    assert len(client.listing()) == 1


def test_memory_that_a_dead_writer_reserved_is_freed(unit, client):
    dying = StorageClient(unit.address, b"secret")
    dying._ask(Reserve([10_000, 20_000]), Reserved)
    assert unit.arena.num_bytes >= 30_000
    dying.close()
    with waiting("unit", "free memory", 30) as wait:
        wait.until(lambda: unit.arena.num_bytes == 0)
    assert len(client.listing()) == 0


def test_a_writer_that_reserves_again_frees_what_it_never_committed(unit, client):
    """A put that fails between the two is tried again; it must not take the unit's memory each time."""
    for _ in range(3):
        client._ask(Reserve([10_000]), Reserved)
        assert unit.arena.num_bytes < 20_000


def test_a_unit_that_dies_while_it_sends_a_row_is_gone(unit):
    reader = StorageClient(unit.address, b"secret", through_memory=False)
    reader.put("row", row(1))
    blocks = reader._ask(Locate(["row"], None, with_bytes=False), Located).rows
    unit.close()
    with pytest.raises(PeerGone, match=unit.address):
        reader._read(blocks)


def test_a_full_unit_names_the_setting_and_keeps_serving():
    unit = StorageServer("127.0.0.1", capacity_bytes=1 << 20).start()
    for through_memory in (True, False):
        client = StorageClient(unit.address, through_memory=through_memory)
        client.put("fits", row(1, 40_000))
        with pytest.raises(StorageFull, match=r"queue\.lead"):
            client.put_many({"one": row(2, 1000), "too much": row(2, 40_000)})
        assert list(client.listing()) == ["fits"]
        client.drop(["fits"])
        assert unit.arena.num_bytes == 0
        client.close()
    unit.close()


def test_a_client_without_the_secret_is_refused(unit, client):
    with pytest.raises(PeerGone):
        StorageClient(unit.address, b"guessed", deadline_s=5)
    with socket.create_connection(unit.address.rsplit(":", 1)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
    assert len(client.listing()) == 0


def test_the_error_for_a_unit_that_is_gone_names_it():
    unit = StorageServer("127.0.0.1").start()
    client = StorageClient(unit.address)
    client.put("early", row(1))
    unit.close()
    with pytest.raises(PeerGone, match=unit.address):
        client.put("late", row(1))
    client.close()
    with pytest.raises(PeerGone, match=unit.address):
        StorageClient(unit.address)


def test_a_unit_that_gives_an_answer_to_another_question_counts_as_gone(unit, client, monkeypatch):
    monkeypatch.setattr(unit, "_answer", lambda link, request, reserved: Listing(["row"]))
    for ask in (lambda: client.put("row", row(1)), lambda: client.get("row"), lambda: client.drop(["row"])):
        with pytest.raises(PeerGone, match=f"{unit.address} is gone: Listing does not answer"):
            ask()
    monkeypatch.undo()


def test_the_process_of_a_unit_drops_and_lists_rows_without_a_connection(unit, client):
    assert unit.listing() == [] and unit.drop(["absent"]) == 0
    client.put_many({"a": {"x": np.arange(3)}, "b": {"x": np.arange(4), "y": np.arange(5)}})
    assert unit.listing() == ["a", "b"]
    assert unit.drop(["b", "absent", "b"]) == 1
    assert unit.listing() == client.listing() == ["a"]
    with pytest.raises(KeyError):
        client.get("b")
