"""A task's own consumption record: which rows it holds or has consumed, and who works on which hand-out."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...comm.messages import RowId


@dataclass(slots=True)
class OpenBatch:
    """Rows that a consumer works on, as these attempts."""

    consumer: str
    attempts: dict[RowId, int]


@dataclass(slots=True)
class TaskRecord:
    """`assigned` are rows of the queue that the task must not get: in their present attempt they are handed out or consumed.

    Every row handed out is consumed, returned, or was lost or evicted meanwhile (`dropped`).
    """

    num_batches: int = 0
    handed: int = 0
    consumed: int = 0
    returned: int = 0
    dropped: int = 0
    begin_receive: dict[int, OpenBatch] = field(default_factory=dict)
    assigned: set[RowId] = field(default_factory=set)

    def open_batch(self, number: int, consumer: str, attempts: dict[RowId, int]) -> None:
        """A consumer gets rows that the task has not had."""
        assert number == self.num_batches + 1, f"hand-out {number} after {self.num_batches}"
        assert not self.assigned.intersection(attempts), (
            f"{sorted(self.assigned.intersection(attempts))} handed out twice"
        )
        self.num_batches = number
        self.handed += len(attempts)
        self.assigned.update(attempts)
        self.begin_receive[number] = OpenBatch(consumer, attempts)

    def close(self, number: int, consumed: Iterable[RowId], missing: Iterable[RowId]) -> None:
        """A hand-out ends: rows consumed; rows gone from the queue, or there as another attempt; the rest comes back."""
        attempts = self.begin_receive.pop(number).attempts
        done, void = set(consumed), set(missing)
        assert not done & void and attempts.keys() >= done | void
        self.consumed += len(done)
        self.dropped += len(void)
        self.returned += len(attempts) - len(done) - len(void)
        self.assigned -= attempts.keys() - done - void

    @property
    def is_balanced(self) -> bool:
        """The record adds up."""
        at_work = sum(len(hand_out.attempts) for hand_out in self.begin_receive.values())
        return self.handed == self.consumed + self.returned + self.dropped + at_work
