"""The messages between the store and its clients, sent as frames.

The store answers a request that has a `number` with one `Answer` of the same number. Other requests have no answer.
"""

import msgspec

from .members import Member

LINK_NAME = "store"
"""The link's name in the handshake."""
PLAIN = b"P"
TLS = b"T"
"""The store's first byte on a connection: whether TLS follows. If an attacker changes it, the handshake fails."""
MAX_REQUEST_BYTES = 8 << 20


class _Struct(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages; the tag is the class name."""


class Join(_Struct, frozen=True):
    """Make this client a member, which counts as dead after `expiry_s` of silence. The answer is its incarnation."""

    number: int
    member: Member
    expiry_s: float


class Announce(_Struct, frozen=True):
    """Replace the facts about this client's member."""

    info: dict[str, str]


class Leave(_Struct, frozen=True):
    """This client's member leaves the run."""

    number: int


class Watch(_Struct, frozen=True):
    """Send this client the members of a role (of all roles if it is empty), and every change from now on."""

    number: int
    role: str


class Beat(_Struct, frozen=True):
    """A heartbeat. The store returns it."""


class Post(_Struct, frozen=True):
    """Add a message to an inbox. Each sender's sequence numbers increase."""

    to: str
    sender: str
    sequence: int
    body: bytes


class OpenInbox(_Struct, frozen=True):
    """Deliver the messages of an inbox to this client. With `confirms` the store keeps them until the client confirms them.

    The answer is the number of times that the inbox has been opened.
    """

    number: int
    name: str
    confirms: bool = False


class Confirm(_Struct, frozen=True):
    """The reader of an inbox has handled its messages up to this place."""

    name: str
    place: int


class CloseInbox(_Struct, frozen=True):
    """Stop delivering to this client. With `is_last` no other reader follows: the store drops this inbox's messages, and later ones."""

    number: int
    name: str
    is_last: bool = False


class SetValue(_Struct, frozen=True):
    """Keep a value under a key."""

    number: int
    key: str
    value: bytes


class GetValue(_Struct, frozen=True):
    """The answer is the value under a key, or None. With `waits` the answer comes once there is a value."""

    number: int
    key: str
    waits: bool = False


class DeleteValue(_Struct, frozen=True):
    """Drop the value under a key."""

    number: int
    key: str


class AddTo(_Struct, frozen=True):
    """Add to the counter under a key, which starts at 0. The answer is the new value."""

    number: int
    key: str
    amount: int


class Sync(_Struct, frozen=True):
    """The answer confirms that the store has handled every earlier request of this client."""

    number: int


class Answer(_Struct, frozen=True):
    """The answer to the request with this number."""

    number: int
    value: int | bytes | None = None


class Delivery(_Struct, frozen=True):
    """A message of an inbox; its `place` is its number in that inbox, from 1."""

    to: str
    sender: str
    sequence: int
    body: bytes
    place: int


class Changed(_Struct, frozen=True):
    """The present state of members that have changed, and the names of those that have left."""

    members: list[Member]
    left: list[str]


Question = Join | Leave | Watch | OpenInbox | CloseInbox | SetValue | GetValue | DeleteValue | AddTo | Sync
"""The requests that have an answer."""
Request = Announce | Beat | Post | Confirm | Question
Push = Answer | Beat | Delivery | Changed

REQUESTS = msgspec.msgpack.Decoder(Request)
PUSHES = msgspec.msgpack.Decoder(Push)
