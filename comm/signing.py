"""Envelopes: a message with its sender and sequence number, signed by an HMAC-SHA256 under the run's secret.

An envelope is one line of JSON (sender, sequence number, signature), then the message's JSON. The signature is over sender,
receiver, sequence number and body.
"""

import hashlib
import hmac
from typing import NamedTuple

import msgspec

from .errors import MessageRefused
from .messages.base import Message
from .messages.codec import decode, encode

_MAX_ENVELOPE_BYTES = 4 << 20  # a store takes 8 MiB a value; above that it resets the connection


class Envelope(NamedTuple):
    """A message as it was received."""

    sender: str
    message: Message


class _Head(msgspec.Struct, frozen=True, array_like=True):
    sender: str
    sequence: int
    signature: str


class MessageSigner:
    """Signs messages and verifies them; remembers the highest sequence number seen of each sender."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._seen: dict[tuple[str, str], int] = {}

    def sign(self, sender: str, to: str, sequence: int, message: Message) -> bytes:
        """The bytes of an envelope."""
        body = encode(message)
        if len(body) > _MAX_ENVELOPE_BYTES:
            raise ValueError(
                f"a {type(message).__name__} of {len(body)} bytes to {to}: at most {_MAX_ENVELOPE_BYTES} fit"
            )
        head = _Head(sender, sequence, self._signature(sender, to, sequence, body))
        return msgspec.json.encode(head) + b"\n" + body

    def verify(self, to: str, envelope: bytes) -> Envelope:
        """The message in an envelope that arrived in the inbox `to`; raises `MessageRefused`."""
        line, _, body = envelope.partition(b"\n")
        try:
            head = msgspec.json.decode(line, type=_Head)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MessageRefused(f"not an envelope: {error}") from error
        if not hmac.compare_digest(head.signature, self._signature(head.sender, to, head.sequence, body)):
            raise MessageRefused(f"wrong signature for sender {head.sender!r}")
        if head.sequence <= self._seen.get((head.sender, to), -1):
            raise MessageRefused(f"message {head.sequence} of {head.sender!r} was seen before")
        self._seen[head.sender, to] = head.sequence
        return Envelope(head.sender, decode(body))

    def _signature(self, sender: str, to: str, sequence: int, body: bytes) -> str:
        parts = msgspec.json.encode([sender, to, sequence]) + b"\n" + body
        return hmac.new(self._secret, parts, hashlib.sha256).hexdigest()
