"""Messages that move trajectories: hub to source, source to destination, both to the hub."""

from .base import Message, RowId


class MigrateOrder(Message, frozen=True):
    """The hub orders a rollout to move its unfinished trajectories to another one, if both still run on `version`."""

    request_id: int
    version: int
    to: str


class TransferOffered(Message, frozen=True):
    """A rollout offers trajectories of `version` to another: `num_bytes` in the memory at `path`, or over `link`."""

    request_id: int
    version: int
    num_rows: int
    num_tokens: int
    num_bytes: int
    path: str = ""
    link: str = ""


class TransferRefused(Message, frozen=True):
    """The destination has not taken the trajectories offered, and will never claim them."""

    request_id: int
    reason: str


class ClaimRows(Message, frozen=True):
    """A rollout has these trajectories of another, or its own back, and asks the hub for their leases.

    The first claim of a row's present attempt gets the lease. Repeated with the same id until answered.
    """

    request_id: int
    rows: list[RowId]
    attempts: list[int]


class ClaimResult(Message, frozen=True):
    """The hub's answer to `ClaimRows`: the new attempt of each row, or 0 where another rollout has the lease."""

    request_id: int
    attempts: list[int]


class RowsReassigned(Message, frozen=True):
    """From the hub to the earlier holder of these attempts: another rollout has the rows now."""

    rows: list[RowId]
    attempts: list[int]


class MigrateResult(Message, frozen=True):
    """The source's answer to `MigrateOrder`: the number of trajectories that moved, or the reason why none did."""

    request_id: int
    num_rows: int = 0
    num_bytes: int = 0
    refusal: str = ""
