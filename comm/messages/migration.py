"""What is said when trajectories move: hub to source, source to destination, both to the hub."""

from .base import Message, RowId


class MoveOrder(Message, frozen=True):
    """The hub asks a rollout to give all unfinished trajectories to another one, if both still run on `version`."""

    order: int
    version: int
    to: str


class ParcelOffered(Message, frozen=True):
    """A rollout offers trajectories to another: `num_bytes` that lie at `path`, or come over `link`, made by `version`."""

    parcel: int
    version: int
    num_rows: int
    num_tokens: int
    num_bytes: int
    path: str = ""
    link: str = ""


class ParcelRefused(Message, frozen=True):
    """The rollout that a parcel was offered to has not taken it, and will never claim what is in it."""

    parcel: int
    reason: str


class Claim(Message, frozen=True):
    """A rollout has these trajectories of another's (or its own back), which had these attempts: may it have the leases?

    Who claims a row's present attempt first has it. Repeated with the same question until answered.
    """

    question: int
    rows: list[RowId]
    attempts: list[int]


class Claimed(Message, frozen=True):
    """The hub's answer to `Claim`: the attempt of each row from now on, or 0 if it is somebody else's."""

    question: int
    attempts: list[int]


class RowsGone(Message, frozen=True):
    """The hub tells who held these attempts of rows that somebody else has them now."""

    rows: list[RowId]
    attempts: list[int]


class MoveEnded(Message, frozen=True):
    """The source's answer to `MoveOrder`: this many trajectories went over; else why none did."""

    order: int
    num_rows: int = 0
    num_bytes: int = 0
    refusal: str = ""
