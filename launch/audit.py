"""`headrace audit RUN...`: replays the journals of runs, checks every line, and prints the account of the trajectories."""

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

    def run() -> int:
        args = parser.parse_args(words)
        if args.processes is not None and args.processes < 1:
            raise SettingError(f"--processes: {args.processes} is less than 1")
        return _audit(args.runs, args.processes or usable_cores())

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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
