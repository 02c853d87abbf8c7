"""What each of `run.report_to` is given."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Histogram(NamedTuple):
    """The number of values between each edge and the next one: [E - 1] counts of [E] edges, which rise."""

    edges: Sequence[float]
    counts: Sequence[float]


class Tracker(Protocol):
    """Shows one run. Steps come in their order, each once; they count from 1, as on the console."""

    def begin(self, config: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        """Before all else: the settings by their names, and those of them that differ from the defaults."""
        ...

    def step(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        """The numbers of a step, as its line of `metrics.jsonl` has them."""
        ...

    def evaluation(self, version: int, scalars: Mapping[str, float]) -> None:
        """An evaluation that is complete. The line of a later step than its version has it too."""
        ...

    def text(self, step: int, name: str, text: str) -> None:
        """A text of a step."""
        ...

    def end(self, results: Mapping[str, float] | None) -> None:
        """After all else: the run has ended with these results; None if the trainer has died."""
        ...
