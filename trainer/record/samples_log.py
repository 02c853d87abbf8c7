"""The samples of each step: in `samples.jsonl`, and two of them on the console and in TensorBoard now and then."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ...comm.disk import say
from ...comm.errors import DiskFull
from ...comm.recipe import Recipe
from .metrics_log import MetricsLog
from .sample_lines import SampleLines, in_short, two_of
from .samples_file import SamplesFile
from .shown_rows import ShownRows

EVERY = 10
"""Steps from one step whose samples are shown to the next; the first step's are shown too."""


class SamplesLog:
    """Records and shows the samples of steps, as `run.samples` says; none without a tokenizer.

    No sample is worth the run: what goes wrong here, but for a full disk, is said once, and the step has no samples.
    """

    def __init__(self, recipe: Recipe, first_step: int, metrics: MetricsLog, open_tokenizer: Callable[[], Any]) -> None:
        """first_step: the first one without a record, counted from 0. metrics: the log with the run's TensorBoard.

        open_tokenizer: gives the policy's tokenizer, or None. A user's learner may have one of another kind.
        """
        self._file = SamplesFile(Path(recipe.run.dir), first_step, recipe.comm.deadline_s)
        self._metrics = metrics
        self._shown: list[dict[str, Any]] = []
        self._has_failed = False
        self._lines: SampleLines | None = None
        if recipe.run.samples:
            try:
                tokenizer = open_tokenizer()
                self._lines = None if tokenizer is None else SampleLines(recipe, tokenizer)
            except Exception as error:  # noqa: BLE001 - whatever a tokenizer raises
                say(f"warning: no samples are recorded, since the tokenizer cannot be used ({_in_words(error)})")

    def write(self, step: int, rows: ShownRows) -> None:
        """Record the samples of a step, counted from 0."""
        self._shown = []
        if self._lines is None:
            return
        try:
            self._write(self._lines, step, rows)
        except DiskFull:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a tokenizer raises for what a model wrote
            self._say_once(step, error)

    def show(self, step: int) -> None:
        """Show two samples of the step, if it is one of those that are shown."""
        if not self._shown:
            return
        try:
            text = "\n".join(map(in_short, self._shown))
            encoding = sys.stdout.encoding or "utf-8"  # the console's may lack characters of the policy
            say(text.encode(encoding, "backslashreplace").decode(encoding))
            self._metrics.write_text(step, "samples", text)
        except DiskFull:
            raise
        except Exception as error:  # noqa: BLE001
            self._say_once(step, error)

    def close(self) -> None:
        self._file.close()

    def _write(self, to_lines: SampleLines, step: int, rows: ShownRows) -> None:
        lines: list[bytes] = []
        shown: list[dict[str, Any]] = []
        for sample in rows.found():
            fields = to_lines.fields(step, sample)
            lines.append(msgspec.json.encode(fields))
            shown.append(fields)
        self._file.write(lines)
        is_due = step == 0 or (step + 1) % EVERY == 0
        self._shown = two_of(shown) if shown and is_due else []

    def _say_once(self, step: int, error: Exception) -> None:
        if not self._has_failed:
            say(f"warning: step {step + 1} has no samples, nor may others ({_in_words(error)})")
        self._has_failed = True


def _in_words(error: Exception) -> str:
    """An error on one line, in characters that any console has."""
    return ascii(f"{type(error).__name__}: {error}"[:200])[1:-1]
