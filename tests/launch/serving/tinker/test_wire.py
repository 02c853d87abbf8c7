"""Protocol buffers: numbers and fields as the specification has them, and no bytes that do more than be refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.errors import SettingError
from headrace.launch.serving.tinker.bodies import read_address, read_loss_request
from headrace.launch.serving.tinker.wire import WireMessage, data_field, double_field, integer_field

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


@pytest.mark.parametrize(("value", "encoded"), [(1, "0801"), (150, "089601"), (-2, "08feffffffffffffffff01"), (0, "")])
def test_integers_are_those_of_the_specification(value: int, encoded: str):
    assert integer_field(1, value).hex() == encoded
    assert WireMessage(bytes.fromhex(encoded), "it").integer(1) == value


@given(INT64, st.floats(allow_nan=False), st.text(), st.binary())
def test_what_is_written_is_read(integer: int, double: float, text: str, data: bytes):
    raw = integer_field(1, integer) + double_field(2, double) + data_field(3, text.encode()) + data_field(200, data)
    message = WireMessage(raw, "it")
    assert (message.integer(1), message.double(2), message.text(3)) == (integer, double, text)
    assert bytes(message.data(200)) == data and message.has(200) and not message.has(4)


def test_the_last_of_several_values_counts_and_absent_ones_have_a_default():
    message = WireMessage(integer_field(1, 3) + integer_field(1, 4), "it")
    assert (message.integer(1), message.integer(2), message.double(2), message.text(2)) == (4, 0, 0.0, "")


def test_repeated_integers_may_be_packed():
    packed = data_field(4, bytes.fromhex("03960102"))
    assert WireMessage(packed + integer_field(4, 7), "it").integers(4) == [3, 150, 2, 7]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("0a05616263", "it: the message is cut"),
        ("08", "it: the message is cut, or a number has more than 10 bytes"),
        ("08ffffffffffffffffffff01", "a number has more than 10 bytes"),
        ("0b", "field 1 is of the kind 3, which the API does not use"),
        ("0901", "the message is cut"),
    ],
)
def test_bytes_that_are_no_message_are_refused(raw: str, message: str):
    with pytest.raises(SettingError, match=message):
        WireMessage(bytes.fromhex(raw), "it")


def test_a_field_of_another_kind_is_refused():
    message = WireMessage(integer_field(1, 3) + data_field(2, b"\xff"), "it")
    for read in (
        lambda: message.data(1),
        lambda: message.double(1),
        lambda: message.integer(2),
        lambda: message.text(2),
    ):
        with pytest.raises(SettingError, match="another kind than the API's"):
            read()


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(raw: bytes):
    for read in (read_address, read_loss_request):
        try:
            read(raw)
        except SettingError as error:
            assert str(error)


def tensor(data: bytes, dtype: int, *shape: int) -> bytes:
    return data_field(1, data) + integer_field(3, dtype) + b"".join(integer_field(4, size) for size in shape)


def request(chunk: bytes = data_field(1, data_field(1, bytes(8))), given: bytes = b"") -> bytes:
    entry = data_field(1, b"weights") + data_field(2, given)
    return data_field(3, data_field(1, chunk) + data_field(2, entry))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (request(data_field(2, b"")), r"data\[0\].model_input: only tokens are supported, not images or audio"),
        (request(data_field(1, data_field(1, b"123"))), "model_input: 3 bytes are not whole numbers of 4 bytes"),
        (request(given=data_field(2, b"")), r"loss_fn_inputs.weights: a sparse tensor is not supported"),
        (request(given=tensor(bytes(8), 4)), "the type 4 is not float32, int64 or int32"),
        (request(given=tensor(bytes(8), 1, 3)), r"the shape \[3\] is not that of 2 numbers"),
    ],
)
def test_data_that_are_not_supported_are_refused_by_their_field(raw: bytes, message: str):
    with pytest.raises(SettingError, match=message):
        read_loss_request(raw)
