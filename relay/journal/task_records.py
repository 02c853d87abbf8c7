"""A task's own consumption record: which rows it holds or has consumed, and who works on which hand-out."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...comm.messages import RowId


@dataclass(slots=True)
class OpenHandOut:
    """Rows that a consumer works on, as these attempts."""

    consumer: str
    attempts: dict[RowId, int]


@dataclass(slots=True)
class TaskRecord:
    """`taken` are rows of the queue that the task must not get: in their present attempt they are handed out or consumed.

    Every row handed out is consumed, returned, or was lost or evicted meanwhile (`void`).
    """

    num_hand_outs: int = 0
    handed: int = 0
    consumed: int = 0
    returned: int = 0
    void: int = 0
    open: dict[int, OpenHandOut] = field(default_factory=dict)
    taken: set[RowId] = field(default_factory=set)

    def hand_out(self, number: int, consumer: str, attempts: dict[RowId, int]) -> None:
        """A consumer gets rows that the task has not had."""
        assert number == self.num_hand_outs + 1, f"hand-out {number} after {self.num_hand_outs}"
        assert not self.taken.intersection(attempts), f"{sorted(self.taken.intersection(attempts))} handed out twice"
        self.num_hand_outs = number
        self.handed += len(attempts)
        self.taken.update(attempts)
        self.open[number] = OpenHandOut(consumer, attempts)

    def close(self, number: int, consumed: Iterable[RowId], gone: Iterable[RowId]) -> None:
        """A hand-out ends: rows consumed; rows gone from the queue, or there as another attempt; the rest comes back."""
        attempts = self.open.pop(number).attempts
        done, void = set(consumed), set(gone)
        assert not done & void and attempts.keys() >= done | void
        self.consumed += len(done)
        self.void += len(void)
        self.returned += len(attempts) - len(done) - len(void)
        self.taken -= attempts.keys() - done - void

    @property
    def holds(self) -> bool:
        """The record adds up."""
        at_work = sum(len(hand_out.attempts) for hand_out in self.open.values())
        return self.handed == self.consumed + self.returned + self.void + at_work
