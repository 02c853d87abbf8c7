"""Messages about versions of the weights; most travel between sub-inboxes "<name>/weights"."""

import msgspec

from .base import Message


class Offer(msgspec.Struct, frozen=True, tag=True):
    """The sender has this version, or part `part` of its `num_parts`, or is receiving it.

    `spans` are the part's byte ranges in the layout, empty for a single part, which has all; offsets count along them.
    `incarnation` is that of the trainer which made the version: its rank 0's, for all parts.
    """

    version: int
    num_bytes: int
    fingerprint: int
    num_parts: int = 1
    part: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    incarnation: int = 1

    @property
    def identity(self) -> tuple[int, ...]:
        """The fields that the offers of all parts of one version share; of two identities the later one is greater."""
        return self.incarnation, self.version, self.num_bytes, self.fingerprint, self.num_parts


class VersionReady(Message, frozen=True):
    """A relay to the hub: it has all of `version`, with the digest that the actor announced."""

    version: int
    digest: str


class WeightsPulled(Message, frozen=True):
    """A rollout to the hub: it has switched to `version`."""

    version: int
    digest: str


class ReserveSlot(Message, frozen=True):
    """An actor rank on the relay's host asks for the slot to write its offer into. Repeated until answered.

    Version -1 reserves ahead, for the version that the actor publishes next.
    """

    request_id: int
    offer: Offer


class SlotReserved(Message, frozen=True):
    """The relay's answer: the version goes into `slot` of its segment, which has this generation."""

    request_id: int
    slot: int
    generation: int


class ShardWritten(Message, frozen=True):
    """An actor rank has written its offer into the slot; `digest` is that of its part alone."""

    request_id: int
    offer: Offer
    generation: int
    digest: str


class PushResult(Message, frozen=True):
    """The relay's answer to a push; `refusal` is empty on success."""

    request_id: int
    refusal: str = ""


class OpenPushLink(Message, frozen=True):
    """The sender will send versions over the link named; the relay opens end 0 of it."""

    link: str
    backend: str


class SubscribeVersions(Message, frozen=True):
    """The relay opens end 1 of the link named and sends each new version over it."""

    link: str
    backend: str


class FetchVersion(Message, frozen=True):
    """The relay opens end 1 of the link named and sends `version` alone over it."""

    link: str
    backend: str
    version: int
