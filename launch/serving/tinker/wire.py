"""Protocol buffers on the wire: fields with their numbers (https://protobuf.dev/programming-guides/encoding), without a schema's code.

The API has two messages in each direction, so the few kinds of fields that they have are read and written here.
"""

import struct
from collections.abc import Iterator

from ....comm.errors import SettingError

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
"""Kinds of fields on the wire; a reader skips no other ones, since no message of the API has them."""
_MOST_VARINT_BYTES = 10
_LENGTHS = {FIXED64: 8, FIXED32: 4}


class WireMessage:
    """The fields of a message. A field that is absent has the default of its kind."""

    def __init__(self, data: bytes | memoryview, name: str) -> None:
        """name: for errors. Raises `SettingError` for bytes that are no message."""
        self._name = name
        self._fields: dict[int, list[int | memoryview]] = {}
        for number, value in _read(memoryview(data), name):
            self._fields.setdefault(number, []).append(value)

    def integer(self, number: int) -> int:
        """The last value of an integer field: 0 if it is absent; signed, of 64 bits."""
        value = self._last(number)
        if isinstance(value, memoryview):
            raise self._wrong(number)
        value = value or 0
        return value - (1 << 64) if value >> 63 else value

    def double(self, number: int) -> float:
        """The last value of a double field: 0 if it is absent."""
        value = self._last(number)
        if isinstance(value, int) or (value is not None and len(value) != _LENGTHS[FIXED64]):
            raise self._wrong(number)
        return 0.0 if value is None else struct.unpack("<d", value)[0]

    def data(self, number: int) -> memoryview:
        """The last value of a field of bytes: empty if it is absent."""
        values = self._all(number)
        return values[-1] if values else memoryview(b"")

    def text(self, number: int) -> str:
        """The last value of a text field: empty if it is absent."""
        try:
            return str(self.data(number), "utf-8")
        except UnicodeDecodeError as error:
            raise self._wrong(number) from error

    def has(self, number: int) -> bool:
        """Whether a field is there."""
        return number in self._fields

    def messages(self, number: int, name: str) -> list["WireMessage"]:
        """All values of a field of messages."""
        return [WireMessage(value, name) for value in self._all(number)]

    def pairs(self, number: int, name: str) -> list[tuple[str, "WireMessage"]]:
        """The entries of a map with text as keys, each with its entry, whose value is field 2."""
        return [(entry.text(1), entry) for entry in self.messages(number, name)]

    def integers(self, number: int) -> list[int]:
        """All values of a repeated integer field, packed or not."""
        found: list[int] = []
        for value in self._fields.get(number, ()):
            if isinstance(value, int):
                found.append(value)
                continue
            place = 0
            while place < len(value):
                item, place = _varint(value, place, self._name)
                found.append(item)
        return found

    def _last(self, number: int) -> int | memoryview | None:
        values = self._fields.get(number)
        return values[-1] if values else None

    def _all(self, number: int) -> list[memoryview]:
        values = self._fields.get(number, [])
        found = [value for value in values if isinstance(value, memoryview)]
        if len(found) < len(values):
            raise self._wrong(number)
        return found

    def _wrong(self, number: int) -> SettingError:
        return SettingError(f"{self._name}: field {number} has another kind than the API's")


def integer_field(number: int, value: int) -> bytes:
    """An integer field; nothing for 0, its default."""
    return _varint_bytes(number << 3 | VARINT) + _varint_bytes(value) if value else b""


def double_field(number: int, value: float) -> bytes:
    """A double field."""
    return _varint_bytes(number << 3 | FIXED64) + struct.pack("<d", value)


def data_field(number: int, value: bytes) -> bytes:
    """A field of bytes, of text in UTF-8 or of a message."""
    return _varint_bytes(number << 3 | LENGTH) + _varint_bytes(len(value)) + value


def _read(data: memoryview, name: str) -> Iterator[tuple[int, int | memoryview]]:
    place = 0
    while place < len(data):
        key, place = _varint(data, place, name)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, place = _varint(data, place, name)
            yield number, value
            continue
        if kind == LENGTH:
            length, place = _varint(data, place, name)
        elif kind in _LENGTHS:
            length = _LENGTHS[kind]
        else:
            raise SettingError(f"{name}: field {number} is of the kind {kind}, which the API does not use")
        if length > len(data) - place:
            raise SettingError(f"{name}: the message is cut")
        yield number, data[place : place + length]
        place += length


def _varint(data: memoryview, place: int, name: str) -> tuple[int, int]:
    """An unsigned number of up to 64 bits, and the place behind it."""
    value = 0
    for index, byte in enumerate(data[place : place + _MOST_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & ((1 << 64) - 1), place + index + 1
    raise SettingError(f"{name}: the message is cut, or a number has more than {_MOST_VARINT_BYTES} bytes")


def _varint_bytes(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
