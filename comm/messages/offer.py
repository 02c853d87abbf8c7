"""A version of the weights as one process offers it to another: over a link, or for a slot of a relay's segment."""

import msgspec


class Delta(msgspec.Struct, frozen=True):
    """The version may come as its difference of `num_bytes` bytes to version `base`, in elements of `width` bytes."""

    base: int
    num_bytes: int
    width: int


class Offer(msgspec.Struct, frozen=True, tag=True):
    """The sender has this version, or part `part` of its `num_parts`, or is receiving it.

    `spans` are the part's byte ranges in the layout, none means all; offsets count along them.
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
        """The fields that the offers of all parts of one version share."""
        return self.version, self.num_bytes, self.fingerprint, self.num_parts
