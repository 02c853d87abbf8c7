"""The promises about a run after any faults; each check returns sentences about those that do not hold."""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from headrace.relay.journal.files import JournalError
from headrace.relay.journal.replay import replay

from .job import FaultyJob
from .processes import processes_of

_GONE_S = 20.0
_SHOWN = 5


def problems_of_journal(run_dir: Path) -> list[str]:
    """The journal is one that the hub's rules allow, the account holds, and no row was trained twice."""
    try:
        state = replay(run_dir / "journal.jsonl")
    except (JournalError, OSError) as error:
        return [f"the journal does not verify: {error}"]
    times = Counter(trained_rows(run_dir, state.step))
    twice = [row for row, count in times.items() if count > 1]
    return [f"{len(twice)} rows were trained twice: {', '.join(twice[:_SHOWN])}"] if twice else []


def problems_of_end(job: FaultyJob, shared_memory: set[str]) -> Iterator[str]:
    """All processes of a run that has ended are gone, and so are its temporary files; its account holds if there is one.

    `shared_memory` are the names that `/dev/shm` had before the run.
    """
    until = time.monotonic() + _GONE_S
    while (left := processes_of(job.failpoints)) and time.monotonic() < until:
        time.sleep(0.1)
    if left:
        yield f"orphans {_GONE_S:g} s after the end: {', '.join(job.kill())}"
    if files := sorted(path.name for path in job.temporary.iterdir()):
        yield f"left among the temporary files: {', '.join(files[:_SHOWN])}"
    if shared := sorted(shared_memory_names() - shared_memory):
        yield f"left in /dev/shm: {', '.join(shared[:_SHOWN])}"
    summary = job.summary()
    account = summary.get("accounting") if summary else None  # none where the hub itself has failed
    if account is not None and not account["holds"]:
        yield f"the account does not hold: {account}"
    yield from problems_of_journal(job.dir)


def shared_memory_names() -> set[str]:
    """Names in /dev/shm of files of this user. Shared memory is a plain file there; folders are another program's."""
    return {entry.name for entry in os.scandir("/dev/shm") if entry.is_file() and entry.stat().st_uid == os.getuid()}


def trained_rows(run_dir: Path, num_steps: int) -> list[str]:
    """The rows of the first `num_steps` optimizer steps, as the trainer saved them: independent of the hub.

    Files of later steps are of a run that was resumed from an earlier one.
    """
    from safetensors import safe_open

    rows: list[str] = []
    for path in (run_dir / "rows").glob("step_*.safetensors"):
        if int(path.name.partition(".")[0].removeprefix("step_")) >= num_steps:
            continue
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
        parts = [batch["micro_batches"] for batch in json.loads(metadata["list"])["batches"]]
        rows += [key.partition("@")[0] for part in parts for micro_batch in part for key in micro_batch]
    return rows
