"""What the two ends of a link say to each other about a version; `wire` says when."""

from enum import IntEnum

import msgspec

from ...comm.messages.weights import Offer
from .shards import ByteRanges


class FrameKind(IntEnum):
    """What a frame carries."""

    IDLE = 0
    STRUCT = 1
    DATA = 2


def ranges_of(offer: Offer) -> ByteRanges:
    """The byte ranges of the part that is offered."""
    return ByteRanges(offer.spans or ((0, offer.num_bytes),))


class Accept(msgspec.Struct, frozen=True, tag=True):
    """The receiver wants the bytes from `offset` on, or the delta that was offered; -1 if it wants none."""

    offset: int
    takes_delta: bool = False


class Trailer(msgspec.Struct, frozen=True, tag=True):
    """All bytes were sent and this is their digest; empty if the sender gave the version up."""

    digest: str


class TransferAck(msgspec.Struct, frozen=True, tag=True):
    """Whether the receiver's bytes have the announced digest."""

    is_right: bool


Frame = Offer | Accept | Trailer | TransferAck
