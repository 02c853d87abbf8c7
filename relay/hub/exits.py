"""Exits of processes, which their supervisors report to the hub through the run folder: `exits/NAME.json`.

A supervisor imports no torch, so it has no client of the fleet's store, and a process that only reports takes seconds to start. Where
hosts share no files the end of a connection, or of the heartbeat, tells the hub later.
"""

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


def take_exits(run_dir: Path) -> list[ProcessExit]:
    """The reports since the last call; a damaged one is dropped."""
    found: list[ProcessExit] = []
    for path in sorted((run_dir / "exits").glob("*.json")):
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            content = path.read_bytes()
            path.unlink()
            found.append(msgspec.json.decode(content, type=ProcessExit))
    return found
