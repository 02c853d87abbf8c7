"""Messages about the queue on the disk: a relay writes it with each checkpoint, and a resumed run reads it back."""

from .base import Message
from .queue import RowRef


class SaveQueue(Message, frozen=True):
    """From the hub to a relay: write these rows to the disk, for a run that resumes after `step` steps.

    `cursor` is the position in the data that the hub had reached; the answer has the same `number`.
    """

    number: int
    step: int
    cursor: int
    rows: list[RowRef]


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
    rows: list[RowRef]
    problem: str = ""
    is_left: bool = False
