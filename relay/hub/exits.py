"""Exits of processes, which their supervisors report to the hub through the run folder: `exits/NAME.json`.

A supervisor imports no torch, so it has no client of the fleet's store, and a process that only reports takes seconds to start. Where
hosts share no files the end of a connection, or of the heartbeat, tells the hub later.
"""

import shutil
from contextlib import suppress
from pathlib import Path

import msgspec


class ProcessExit(msgspec.Struct, frozen=True):
    """The process `pid` of a role ended, and `how`; with `ends_run` it is not started again."""

    name: str
    pid: int
    how: str
    ends_run: bool = False


def report_exit(run_dir: Path, exit_: ProcessExit) -> None:
    """Leave a report for the hub. It replaces an earlier one of this name; on a full disk it is left out."""
    path = run_dir / "exits" / f"{exit_.name}.json"
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(exit_))
        new.replace(path)


def clear_exits(run_dir: Path) -> None:
    """Remove the reports of the run before, while no supervisor of this one runs."""
    shutil.rmtree(run_dir / "exits", ignore_errors=True)


def take_exits(run_dir: Path) -> list[ProcessExit]:
    """The reports since the last call; a damaged one is dropped."""
    found: list[ProcessExit] = []
    for path in sorted((run_dir / "exits").glob("*.json")):
        taken = path.with_suffix(".taken")
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            path.replace(taken)  # a report that comes now is another file
            content = taken.read_bytes()
            taken.unlink()
            found.append(msgspec.json.decode(content, type=ProcessExit))
    return found
