"""Rows and answers of a run, compared with its journal: what `headrace audit --rows` and `--answers` print."""

from pathlib import Path

from ...comm.errors import SettingError
from ...relay.receipts import KEY_FILE
from ..config.run_folder import JOURNAL_FILE
from .answers import end_problem, read_answers
from .published import published_in


class Comparison:
    """What has been compared of one run: `counts` are lines about what is true, `problems` about what is not."""

    def __init__(self, run: Path) -> None:
        self.counts: list[str] = []
        self.problems: list[str] = []
        self._run = run
        self._journal = run / JOURNAL_FILE

    def compare_rows(self) -> None:
        """Compare the files of `rows/`. Raises `SettingError` for a damaged one, `JournalError`."""
        from .saved_rows import check_rows  # which imports torch

        num_rows = 0
        num_wrong = 0
        for problem in check_rows(self._run, self._journal):
            num_rows += 1
            if problem:
                num_wrong += 1
                self.problems.append(problem)
        self.counts.append(f"{self._run}: {num_rows - num_wrong} of {num_rows} saved rows are those of the journal")

    def compare_answers(self, file: Path) -> None:
        """Compare a file of answers. Raises `SettingError` for one that has none, and without the run's key, `JournalError`."""
        try:
            key = (self._run / KEY_FILE).read_bytes()
        except OSError as error:
            raise SettingError(
                f"--answers: {self._run / KEY_FILE} cannot be read ({error.strerror}); only who may read it can check receipts, and a"
                " run that has never answered requests has none"
            ) from error
        saved = read_answers(file)
        published = published_in(self._journal)
        named = [(f"response {each.index} of {each.id}", each.problem(key, published)) for each in saved.responses]
        named += [(f"end of {end.get('id')}", end_problem(end, key, published)) for end in saved.ends]
        wrong = [f"{file}: {name}: {problem}" for name, problem in named if problem]
        self.problems += wrong
        self.counts.append(f"{file}: {len(named) - len(wrong)} of {len(named)} answers are those of {self._run}")
