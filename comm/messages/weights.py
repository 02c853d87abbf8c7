"""Messages about versions of the weights; most travel between sub-inboxes "<name>/weights"."""

import msgspec

from .base import Message


class Offer(msgspec.Struct, frozen=True, tag=True):
    """The sender has this version, or part `part` of its `num_parts`, or is receiving it.

    `spans` are the part's byte ranges in the layout, empty for a single part, which has all; offsets count along them.
    `incarnation` is that of the trainer which made the version: its rank 0's, for all parts. `slot` is that of the sender's
    segment which holds the part, where the receiver can read it there.
    """

    version: int
    num_bytes: int
    fingerprint: int
    num_parts: int = 1
    part: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    incarnation: int = 1
    slot: int = 0

    @property
    def identity(self) -> tuple[int, ...]:
        """The fields that the offers of all parts of one version share; of two identities the later one is greater."""
        return self.incarnation, self.version, self.num_bytes, self.fingerprint, self.num_parts


class VersionReady(Message, frozen=True):
    """A relay to the hub: it has all of `version`, with the digest that the actor announced."""

    version: int
    digest: str


class WeightsPulled(Message, frozen=True):
    """A rollout to the hub: it has switched to `version`, under which `num_unfinished` trajectories continue."""

    version: int
    digest: str
    num_unfinished: int = 0
    is_ordered: bool = False
    """The hub has ordered it."""


class SwitchWeights(Message, frozen=True):
    """The hub to a rollout that still has `version`: take the newest one now, and continue the unfinished trajectories under it."""

    version: int


class OpenPushLink(Message, frozen=True):
    """The sender will send versions over the link named; the relay opens end 0 of it.

    `segment` is the path of the sender's memory, for a relay on its host: the bytes are in the slots there that offers name.
    """

    link: str
    backend: str
    segment: str = ""


class OpenPullLink(Message, frozen=True):
    """The relay opens end 1 of the link named, and sends each new version over it, or `version` alone."""

    link: str
    backend: str
    version: int | None = None
