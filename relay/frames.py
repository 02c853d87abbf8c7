"""What the two ends of a link say to each other about a version; `wire` says when."""

from enum import IntEnum

import msgspec

from .parts import Ranges


class Kind(IntEnum):
    """What a frame carries."""

    IDLE = 0
    STRUCT = 1
    DATA = 2


class Delta(msgspec.Struct, frozen=True):
    """The version may come as its difference of `num_bytes` bytes to version `base`, in elements of `width` bytes."""

    base: int
    num_bytes: int
    width: int


class Offer(msgspec.Struct, frozen=True, tag=True):
    """The sender has this version, or part `part` of its `num_parts`, or is receiving it.

    `spans` are the part's byte ranges in the layout; offsets count along them.
    """

    version: int
    num_bytes: int
    fingerprint: int
    num_parts: int = 1
    part: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    delta: Delta | None = None

    @property
    def identity(self) -> tuple[int, ...]:
        """What the offers of all parts of one version have in common."""
        return self.version, self.num_bytes, self.fingerprint, self.num_parts

    @property
    def ranges(self) -> Ranges:
        """The part's byte ranges."""
        return Ranges(self.spans or ((0, self.num_bytes),))


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The receiver wants the bytes from `offset` on, or the delta that was offered; -1 if it wants none."""

    offset: int
    takes_delta: bool = False


class Trailer(msgspec.Struct, frozen=True, tag=True):
    """All bytes were sent and this is their digest; empty if the sender gave the version up."""

    digest: str


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """Whether the receiver's bytes have the announced digest."""

    is_right: bool


Frame = Offer | Answer | Trailer | Verdict
