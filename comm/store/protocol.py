"""What clients and the store send each other, as frames.

A request with a `number` is answered by one `Answer` with that number; the others are not answered.
"""

import msgspec

from .members import Member

LINK_NAME = "store"
"""The name under which both ends of a connection prove the secret."""
PLAIN = b"P"
TLS = b"T"
"""The first byte of the store: whether the rest of a connection is encrypted. Who changes it on its way makes the proofs fail."""
MAX_REQUEST_BYTES = 8 << 20


class _Struct(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all of them; `type` is the class name."""


class Join(_Struct, frozen=True):
    """This client is a member from now on, dead after `expiry_s` of silence; the answer is its incarnation."""

    number: int
    member: Member
    expiry_s: float


class Announce(_Struct, frozen=True):
    """Facts about this client's member, all of them."""

    info: dict[str, str]


class Leave(_Struct, frozen=True):
    """This client's member leaves the run."""

    number: int


class Watch(_Struct, frozen=True):
    """Tell this client the members of a role (of all roles if it is empty), and from now on each change."""

    number: int
    role: str


class Beat(_Struct, frozen=True):
    """This client lives; the store answers with a `Beat`."""


class Post(_Struct, frozen=True):
    """A message to an inbox. The sequence numbers of a sender grow."""

    to: str
    sender: str
    sequence: int
    body: bytes


class OpenInbox(_Struct, frozen=True):
    """Deliver the messages of an inbox to this client. With `confirms` they stay until it confirms them.

    The answer is how often the inbox has been opened.
    """

    number: int
    name: str
    confirms: bool = False


class Confirm(_Struct, frozen=True):
    """The reader of an inbox has handled its messages up to this place."""

    name: str
    place: int


class CloseInbox(_Struct, frozen=True):
    """Deliver no more to this client. If it `is_last`, nobody opens the inbox again, and its messages are dropped."""

    number: int
    name: str
    is_last: bool = False


class SetValue(_Struct, frozen=True):
    """Keep a value under a key."""

    number: int
    key: str
    value: bytes


class GetValue(_Struct, frozen=True):
    """The answer is the value under a key, or None; with `waits` it comes once there is a value."""

    number: int
    key: str
    waits: bool = False


class DeleteValue(_Struct, frozen=True):
    """Drop the value under a key."""

    number: int
    key: str


class AddTo(_Struct, frozen=True):
    """Add to the counter under a key, which begins at 0; the answer is the sum."""

    number: int
    key: str
    amount: int


class Sync(_Struct, frozen=True):
    """The answer says that the store has handled all that this client sent before."""

    number: int


class Answer(_Struct, frozen=True):
    """The answer to the request with this number."""

    number: int
    value: int | bytes | None = None


class Delivery(_Struct, frozen=True):
    """A message of an inbox; places count its deliveries."""

    to: str
    sender: str
    sequence: int
    body: bytes
    place: int


class Changed(_Struct, frozen=True):
    """Members as they are now, and the names of those that have left."""

    members: list[Member]
    left: list[str]


Question = Join | Leave | Watch | OpenInbox | CloseInbox | SetValue | GetValue | DeleteValue | AddTo | Sync
"""The requests that have an answer."""
Request = Announce | Beat | Post | Confirm | Question
Push = Answer | Beat | Delivery | Changed

REQUESTS = msgspec.msgpack.Decoder(Request)
PUSHES = msgspec.msgpack.Decoder(Push)
