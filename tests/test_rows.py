import numpy as np
import pytest

from headrace.comm.errors import PeerGone, WrongDigest
from headrace.comm.rows import MemoryRows, RowClient, RowUnit
from headrace.comm.store import connect_store


@pytest.fixture(scope="module")
def unit():
    unit = RowUnit("127.0.0.1")
    yield unit
    unit.close()


@pytest.fixture(params=["unit", "memory"])
def rows(request):
    if request.param == "memory":
        yield MemoryRows()
        return
    client = RowClient(request.getfixturevalue("unit").address)
    yield client
    client.drop([key.removeprefix("row/") for key in connect_store(client.address, 5).list_keys()])


def row(seed, num_tokens=50):
    random = np.random.default_rng(seed)
    return {
        "token_ids": random.integers(0, 1000, num_tokens),
        "logprobs": random.standard_normal(num_tokens).astype(np.float32),
        "empty": np.zeros(0, np.int32),
    }


def assert_same(read, written):
    assert read.keys() == written.keys()
    for name, column in written.items():
        assert read[name].dtype == column.dtype
        assert np.array_equal(read[name], column)


def test_a_row_comes_back_as_it_was_put(rows):
    num_bytes = rows.put("0.1.2", row(1))
    assert num_bytes >= 50 * 12
    assert_same(rows.get("0.1.2"), row(1))


def test_a_row_that_is_not_there_is_a_key_error(rows):
    with pytest.raises(KeyError):
        rows.get("absent")


def test_putting_again_overwrites_and_counts_once(rows):
    for _ in range(3):
        rows.put("again", row(1))
    rows.put("again", row(2))
    assert rows.count() == 1
    assert_same(rows.get("again"), row(2))


def test_later_columns_add_to_a_row(rows):
    rows.put("grows", row(1))
    rows.put("grows", {"reward": np.array([0.5], np.float32)})
    assert_same(rows.get("grows"), row(1) | {"reward": np.array([0.5], np.float32)})
    assert rows.count() == 1


def test_only_the_columns_asked_for_are_read(rows):
    rows.put("wide", row(1))
    assert rows.get("wide", ["logprobs"]).keys() == {"logprobs"}
    with pytest.raises(KeyError, match="absent"):
        rows.get("wide", ["absent"])


def test_dropping_tells_how_many_rows_there_were(rows):
    for key in "abc":
        rows.put(key, row(ord(key)))
    assert rows.drop(["a", "b", "z"]) == 2
    assert rows.count() == 1


def test_a_row_larger_than_a_value_of_the_store_is_split(rows):
    large = row(3, num_tokens=1_500_000)
    assert rows.put("large", large) > 16 << 20
    assert rows.count() == 1
    assert_same(rows.get("large"), large)
    rows.put("large", row(4))
    assert_same(rows.get("large"), row(4))


def test_overwritten_and_dropped_rows_leave_no_parts_behind(unit):
    client = RowClient(unit.address)
    store = connect_store(unit.address, 5)
    before = store.num_keys()
    client.put("large", row(3, num_tokens=1_500_000))
    assert store.num_keys() - before == 5
    client.put("large", row(5, num_tokens=600_000))
    assert store.num_keys() - before == 2
    assert client.drop(["large"]) == 1
    assert store.num_keys() == before


def test_bytes_that_are_not_the_writers_are_refused(unit):
    client, store = RowClient(unit.address), connect_store(unit.address, 5)
    client.put("torn", row(1))
    store.set("row/torn", store.get("row/torn")[:-1] + b"\xff")
    with pytest.raises(WrongDigest, match="torn"):
        client.get("torn")
    client.drop(["torn"])


def test_a_row_whose_part_is_missing_is_refused(unit):
    client, store = RowClient(unit.address), connect_store(unit.address, 5)
    client.put("holed", row(1, num_tokens=1_000_000))
    (part,) = [key for key in store.list_keys() if key.endswith("/2")]
    store.delete_key(part)
    with pytest.raises(WrongDigest, match="holed"):
        client.get("holed")
    client.drop(["holed"])


def test_a_unit_that_is_gone_is_named():
    unit = RowUnit("127.0.0.1")
    client = RowClient(unit.address)
    unit.close()
    with pytest.raises(PeerGone, match=unit.address):
        client.put("late", row(1))
