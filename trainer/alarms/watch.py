"""A watch of a run: it judges each step by its metrics, and names what is wrong and what to do."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

Metrics = Mapping[str, object]

STEPS = 5
"""Steps in a row that a warning is of: one odd step is none, and five of an hour each are found within a working day."""


class Alarm(NamedTuple):
    """A cause, as in the metric `alarm/CAUSE`, and the sentence with the evidence and the setting to change."""

    cause: str
    text: str
    is_collapse: bool = False
    """Learning is about to collapse. Everything else is a warning: the run wastes its time."""


class Watch(Protocol):
    """Judges the steps of a run in their order. Those of the steps before a restart, given again, bring it to the same state."""

    def judge(self, metrics: Metrics) -> Iterable[Alarm]:
        """The alarms of a step; the same one again in each step that still has its cause."""
        ...


class Streak:
    """Counts the steps in a row to which something applies."""

    def __init__(self, length: int = STEPS) -> None:
        self.length = length
        self._num_steps = 0

    def is_full(self, applies: bool) -> bool:
        """Whether it applies to this step, and to the `length - 1` before it."""
        self._num_steps = self._num_steps + 1 if applies else 0
        return self._num_steps >= self.length


def number(metrics: Metrics, name: str) -> float:
    """A metric that is a number; 0 if the step does not have it."""
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
