"""The store's client: what it reads."""

from headrace.comm.store import StoreServer, read_value


def test_a_value_is_read_without_waiting_for_it():
    """A `get` waits for its key; an end of a link waited for a day for a key that the other had deleted since its `check`."""
    store = StoreServer("127.0.0.1").store
    assert read_value(store, "absent") is None
    assert not store.check(["absent"])
    store.set("present", b"\x00\xffbytes")
    assert read_value(store, "present") == b"\x00\xffbytes"
    store.delete_key("present")
    assert read_value(store, "present") is None


def test_an_empty_value_is_a_value():
    store = StoreServer("127.0.0.1").store
    store.set("empty", b"")
    assert read_value(store, "empty") == b""
