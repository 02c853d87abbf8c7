"""The samples of each step: in `samples.jsonl`, and two of them on the console and in TensorBoard now and then."""

import sys
from pathlib import Path
from typing import Any

import msgspec

from ...comm.disk import say
from ...comm.recipe import Recipe
from .metrics_log import MetricsLog
from .sample_lines import SampleLines, in_short, two_of
from .samples_file import SamplesFile
from .shown_rows import ShownRows

EVERY = 10
"""Steps from one step whose samples are shown to the next; the first step's are shown too."""
MOST_TOKENS = 1 << 15
"""Response tokens of a step with texts and log-probs of their own. Samples beyond have their text alone."""


class SamplesLog:
    """Records and shows the samples of steps, as `run.samples` says; none without a tokenizer."""

    def __init__(self, recipe: Recipe, first_step: int, metrics: MetricsLog, tokenizer: Any) -> None:
        """first_step: the first one without a record, counted from 0. metrics: the log with the run's TensorBoard."""
        self._file = SamplesFile(Path(recipe.run.dir), first_step, recipe.comm.deadline_s)
        self._metrics = metrics
        self._lines = None if tokenizer is None or not recipe.run.samples else SampleLines(recipe, tokenizer)
        self._shown: list[dict[str, Any]] = []

    def write(self, step: int, rows: ShownRows) -> None:
        """Record the samples of a step, counted from 0."""
        if self._lines is None:
            return
        left = MOST_TOKENS
        lines: list[bytes] = []
        shown: list[dict[str, Any]] = []
        for sample in rows.found():
            left -= len(sample.response_ids)
            fields = self._lines.fields(step, sample, has_tokens=left >= 0)
            lines.append(msgspec.json.encode(fields))
            shown.append(fields)
        self._file.write(lines)
        is_due = step == 0 or (step + 1) % EVERY == 0
        self._shown = two_of(shown) if shown and is_due else []

    def show(self, step: int) -> None:
        """Show two samples of the step, if it is one of those that are shown."""
        if self._shown:
            text = "\n".join(map(in_short, self._shown))
            encoding = sys.stdout.encoding or "utf-8"  # the console's may lack characters of the policy
            say(text.encode(encoding, "backslashreplace").decode(encoding))
            self._metrics.write_text(step, "samples", text)
            self._shown = []

    def close(self) -> None:
        self._file.close()
