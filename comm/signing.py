"""Signatures under the run's secret (HMAC-SHA256): of messages, and of the entries that members write into the store.

An envelope is one line of JSON (sender, sequence number, signature), then the message's JSON. The signature is over sender,
receiver, sequence number and body. Each purpose has a key of its own, so no signature serves twice. With `comm.tls` the
message is encrypted (AES-256-GCM), and the signature is over what was encrypted.
"""

import hmac
import logging
import os
from collections import defaultdict
from typing import NamedTuple

import msgspec

from .errors import MessageRefused, is_power_of_ten
from .messages.base import Message
from .messages.codec import decode, encode

_SIGNATURE_BYTES = 32
_NONCE_BYTES = 12
_log = logging.getLogger(__name__)
_MAX_ENVELOPE_BYTES = 4 << 20  # a store takes 8 MiB a value; above that it resets the connection


class Envelope(NamedTuple):
    """A message as it was received."""

    sender: str
    message: Message


class _Head(msgspec.Struct, frozen=True, array_like=True):
    sender: str
    sequence: int
    signature: str
    is_encrypted: bool = False


def derive_key(secret: bytes, purpose: str) -> bytes:
    """The key of a purpose, 32 bytes."""
    return hmac.digest(secret, purpose.encode(), "sha256")


def sign_entry(secret: bytes, name: str, entry: bytes) -> bytes:
    """The value of the store's key `name`: the signature, then the entry."""
    return hmac.digest(derive_key(secret, f"entry {name}"), entry, "sha256") + entry


def verify_entry(secret: bytes, name: str, signed: bytes) -> bytes:
    """The entry that a member wrote under `name`; raises `MessageRefused`."""
    signature = signed[:_SIGNATURE_BYTES]
    entry = signed[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, hmac.digest(derive_key(secret, f"entry {name}"), entry, "sha256")):
        raise MessageRefused(f"wrong signature of {name}")
    return entry


class EntryReader:
    """Reads entries that any client of the store may have overwritten: one that no member of the run signed is not there."""

    def __init__(self, secret: bytes, reader: str) -> None:
        """`reader` is the name of this process in the log, which gets the first, the tenth, ... entry that is ignored."""
        self._secret = secret
        self._reader = reader
        self._refused: dict[str, int] = {}
        self._num_refused = 0

    def read(self, key: str, signed: bytes) -> bytes | None:
        """The entry that a member wrote under `key`, from the value there; None for any other value."""
        try:
            return verify_entry(self._secret, key, signed)
        except MessageRefused as refusal:
            if signed and self._refused.get(key) != hash(signed):  # once for each value, however often it is read
                self._refused[key] = hash(signed)
                self._num_refused += 1
                if is_power_of_ten(self._num_refused):
                    _log.warning(
                        "%s ignores an entry of the store: %s (%d so far)", self._reader, refusal, self._num_refused
                    )
        return None

    def read_number(self, key: str, signed: bytes) -> int | None:
        """The same for an entry that is a number, as decimal digits."""
        entry = self.read(key, signed)
        return int(entry) if entry is not None and entry.isdigit() else None


def encrypt(key: bytes, text: bytes) -> bytes:
    """A random nonce, then the text under AES-256-GCM (NIST SP 800-38D) with its tag; `key` has 32 bytes."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # an extra: `comm.tls` is checked at the start

    nonce = os.urandom(_NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, text, None)


def decrypt(key: bytes, encrypted: bytes) -> bytes:
    """The text that was encrypted; raises `MessageRefused`."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(encrypted[:_NONCE_BYTES], encrypted[_NONCE_BYTES:], None)
    except (InvalidTag, ValueError) as error:
        raise MessageRefused("an encrypted message that this run's secret does not open") from error


class MessageSigner:
    """Signs messages and verifies them; remembers the highest sequence number seen of each sender.

    With `encrypts` those that it signs are encrypted; it reads both kinds.
    """

    def __init__(self, secret: bytes, encrypts: bool = False) -> None:
        self._key = derive_key(secret, "messages")
        self._cipher_key = derive_key(secret, "message cipher")
        self._encrypts = encrypts
        self._seen: defaultdict[str, dict[str, int]] = defaultdict(dict)

    def sign(self, sender: str, to: str, sequence: int, message: Message) -> bytes:
        """The bytes of an envelope."""
        body = encode(message)
        if len(body) > _MAX_ENVELOPE_BYTES:
            raise ValueError(
                f"a {type(message).__name__} of {len(body)} bytes to {to}: at most {_MAX_ENVELOPE_BYTES} fit"
            )
        if self._encrypts:
            body = encrypt(self._cipher_key, body)
        head = _Head(sender, sequence, self._signature(sender, to, sequence, body), self._encrypts)
        return msgspec.json.encode(head) + b"\n" + body

    def verify(self, to: str, envelope: bytes) -> Envelope:
        """The message in an envelope that arrived in the inbox `to`; raises `MessageRefused`."""
        line, _, body = envelope.partition(b"\n")
        try:
            head = msgspec.json.decode(line, type=_Head)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MessageRefused(f"not an envelope: {error}") from error
        signature = self._signature(head.sender, to, head.sequence, body)
        if not hmac.compare_digest(head.signature.encode(), signature.encode()):
            raise MessageRefused(f"wrong signature for sender {head.sender!r}")
        if head.sequence <= self._seen[to].get(head.sender, -1):
            raise MessageRefused(f"message {head.sequence} of {head.sender!r} was seen before")
        self._seen[to][head.sender] = head.sequence
        return Envelope(head.sender, decode(decrypt(self._cipher_key, body) if head.is_encrypted else body))

    def seen(self, to: str) -> dict[str, int]:
        """The highest sequence number of each sender that the inbox `to` has seen."""
        return dict(self._seen[to])

    def _signature(self, sender: str, to: str, sequence: int, body: bytes) -> str:
        parts = msgspec.json.encode([sender, to, sequence]) + b"\n" + body
        return hmac.digest(self._key, parts, "sha256").hex()
