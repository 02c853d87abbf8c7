"""The checkpoint that a run resumes from, chosen before its processes start: the newest that is whole and in the journal."""

from pathlib import Path

from ..comm.errors import SettingError
from ..relay.checkpoints import CheckpointFolder
from ..relay.journal.journal import checkpoints_in


def choose_checkpoint(run_dir: Path) -> tuple[int | None, list[str]]:
    """The number of steps after which the run continues, None for a start at step 1, and lines that say which and why.

    Reads every byte of the checkpoint. Raises `SettingError` if there are checkpoints and none can be used.
    """
    folder, journal = CheckpointFolder(run_dir), run_dir / "journal.jsonl"
    found = {*folder.whole(), *folder.incomplete()}
    try:
        found |= {step for step in (folder.latest(),) if step is not None}
        problems: list[str] = []
    except SettingError as error:
        problems = [str(error).removeprefix("run.resume: ")]
    if not found and not problems:
        return None, [f"run.resume=auto: {run_dir} has no checkpoint; the run starts at step 1"]
    known = checkpoints_in(journal) if journal.exists() else {}
    for step in sorted(found, reverse=True):
        problem = folder.problem(step) if step in known else "is not in the journal"
        if not problem:
            passed_over = [f"run.resume=auto: {reason}; it is passed over" for reason in problems]
            return step, [
                *passed_over,
                f"run.resume=auto: the run continues after step {step}, from {folder.path(step)}",
            ]
        problems.append(f"{folder.path(step).name} {problem}")
    raise SettingError(
        f"run.resume: no checkpoint in {folder.root} can be used: {'; '.join(problems)}. Set another run.dir,"
        " or remove that folder to start at step 1"
    )
