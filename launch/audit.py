"""`headrace audit RUN...`: replays the journals of runs, checks every line, and prints the account of the trajectories.

With `--rows` and `--answers` it also compares saved rows, and answers of the run's front, with the journal.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from ..comm.errors import SettingError
from .command_line import CommandParser, exit_code
from .config.run_folder import JOURNAL_FILE
from .cores import usable_cores


def main(words: Sequence[str]) -> int:
    """Returns the exit code: 1 if a journal does not verify, 2 for a folder without one."""
    parser = CommandParser("audit", "Checks the journal of each run against the rules, and counts its trajectories.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--processes",
        type=int,
        help="that verify the files of a long journal beside each other; default: one for each core",
    )

    parser.add_argument("--rows", action="store_true", help="compare the rows in rows/ with the journal, too")
    parser.add_argument(
        "--answers",
        nargs="+",
        default=[],
        type=Path,
        metavar="FILE",
        help="files with answers of the run over HTTP, to compare, too",
    )

    def run() -> int:
        args = parser.parse_args(words)
        if args.processes is not None and args.processes < 1:
            raise SettingError(f"--processes: {args.processes} is less than 1")
        if args.answers and len(args.runs) > 1:
            raise SettingError("--answers: name one run, that of the answers")
        if exit_code := _audit(args.runs, args.processes or usable_cores()):
            return exit_code
        return _compare(list(map(Path, args.runs)), args.answers, has_rows=args.rows)

    return exit_code(run)


def _audit(runs: Sequence[str], num_processes: int) -> int:
    for run in runs:
        if not (Path(run) / JOURNAL_FILE).is_file():
            raise SettingError(f"{run} is not the folder of a run: it has no {JOURNAL_FILE}")
    from ..relay.journal.files import JournalError
    from .report.journal_audit import audit_lines

    for run in runs:
        try:
            lines = [*audit_lines(Path(run), num_processes)]
        except (JournalError, OSError) as error:
            print(error, file=sys.stderr)
            return 1
        print("\n".join(lines))
    return 0


def _compare(runs: Sequence[Path], answers: Sequence[Path], *, has_rows: bool) -> int:
    """Compare saved rows and answers with the journals of their runs; the lines of what is wrong go to stderr."""
    if not has_rows and not answers:
        return 0
    from .report.certificates import Comparison

    exit_code = 0
    for run in runs:
        comparison = Comparison(run)
        if has_rows:
            comparison.compare_rows()
        for file in answers:
            comparison.compare_answers(file)
        for problem in comparison.problems:
            print(problem, file=sys.stderr)
            exit_code = 1
        print("\n".join(comparison.counts))
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
