"""What is said when trajectories move: hub to source, source to destination, both to the hub."""

from .base import Message, RowId


class MigrateOrder(Message, frozen=True):
    """The hub asks a rollout to give all unfinished trajectories to another one, if both still run on `version`."""

    request_id: int
    version: int
    to: str


class TransferOffered(Message, frozen=True):
    """A rollout offers trajectories to another: `num_bytes` that lie at `path`, or come over `link`, made by `version`."""

    request_id: int
    version: int
    num_rows: int
    num_tokens: int
    num_bytes: int
    path: str = ""
    link: str = ""


class TransferRefused(Message, frozen=True):
    """The rollout that a parcel was offered to has not taken it, and will never claim what is in it."""

    request_id: int
    reason: str


class ClaimRows(Message, frozen=True):
    """A rollout has these trajectories of another's (or its own back), which had these attempts: may it have the leases?

    Who claims a row's present attempt first has it. Repeated with the same question until answered.
    """

    request_id: int
    rows: list[RowId]
    attempts: list[int]


class ClaimResult(Message, frozen=True):
    """The hub's answer to `ClaimRows`: the attempt of each row from now on, or 0 if it is somebody else's."""

    request_id: int
    attempts: list[int]


class RowsReassigned(Message, frozen=True):
    """The hub tells who held these attempts of rows that somebody else has them now."""

    rows: list[RowId]
    attempts: list[int]


class MigrateResult(Message, frozen=True):
    """The source's answer to `MigrateOrder`: this many trajectories went over; else why none did."""

    request_id: int
    num_rows: int = 0
    num_bytes: int = 0
    refusal: str = ""
