"""Messages as JSON and back."""

from functools import cache
from typing import Union

import msgspec

from ..errors import MessageRefused
from .base import Message


def encode(message: Message) -> bytes:
    """The JSON bytes of a message."""
    return msgspec.json.encode(message)


def decode(body: bytes) -> Message:
    """The message in `body`; raises `MessageRefused` unless it is exactly one message of this package."""
    try:
        return _decoder().decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageRefused(f"not a message: {error}") from error


@cache
def _decoder() -> msgspec.json.Decoder[Message]:
    # Importing the package imports all its modules, so every message class is defined before the first call.
    return msgspec.json.Decoder(Union[tuple(Message.__subclasses__())])  # noqa: UP007 - built from the list
