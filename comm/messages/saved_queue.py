"""Messages about the queue on the disk: a relay writes it with each checkpoint, and a resumed run reads it back."""

import msgspec

from .base import Message, RowId


class SavedRow(msgspec.Struct, frozen=True, array_like=True):
    """A finished row, or the first tokens of an unfinished one (`reward` is None), and the units that have its bytes."""

    row: RowId
    attempt: int
    storage_ids: list[str]
    version: int
    num_tokens: int
    reward: float | None = None
    num_versions: int = 1

    @property
    def key(self) -> str:
        """The key of its bytes in each of its units."""
        return self.row.partial_key(self.attempt) if self.reward is None else self.row.key(self.attempt)


class SaveQueue(Message, frozen=True):
    """From the hub to a relay: write these rows to the disk, for a run that resumes after `step` steps.

    `cursor` is the position in the data that the hub had reached; the answer has the same `number`.
    """

    number: int
    step: int
    cursor: int
    rows: list[SavedRow]


class QueueSaved(Message, frozen=True):
    """A relay's answer to `SaveQueue`: so many rows are on the disk; `problem` says why it is 0."""

    number: int
    num_rows: int
    problem: str = ""


class RestoreQueue(Message, frozen=True):
    """From the hub to a relay: read the rows that were saved for a run that resumes after `step` steps into the storage units."""

    step: int


class QueueRestored(Message, frozen=True):
    """A relay's answer to `RestoreQueue`: these rows are in the storage units; `problem` says why others are not.

    `is_left`: the file is whole and has the others, so a later run may read them.
    """

    step: int
    cursor: int
    rows: list[SavedRow]
    problem: str = ""
    is_left: bool = False
