"""Where a resumed run continues, decided before its processes start; nothing that it has trained is lost silently.

It continues after its last trained step. The trainer loads the newest checkpoint that is whole and in the journal, or a newer copy of
its state that the run before has left in `memory/`, and trains the steps after it again from `rows/`, like a trainer that starts again
after its death. Where the run continues depends on checkpoint and rows alone, so a damaged copy loses nothing. Files that the run does
not continue are renamed to `NAME.discarded-N`.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from ..comm.errors import SettingError
from ..comm.recipe import Recipe, RunSettings
from ..relay.checkpoints import CheckpointFolder, number_of
from ..relay.journal.cutting import KnownSteps, cut_after, steps_in
from ..relay.journal.evaluations import EVALUATIONS_FILE
from ..relay.journal.files import JournalError
from ..relay.journal.journal import Journal
from ..relay.weights.copies_on_disk import FOLDER as MEMORY
from ..relay.weights.copies_on_disk import CopiesOnDisk
from ..trainer.record.samples_file import SAMPLES_FILE, whole_lines
from .config.device_defaults import changed_type
from .config.load import read_recipe
from .config.run_folder import CONFIG_FILE, JOURNAL_FILE, JOURNAL_FOLDER, METRICS_FILE, SUMMARY_FILE, read_summary

ROWS = "rows"
_OF_ONE_RUN = (
    JOURNAL_FILE,
    JOURNAL_FOLDER,
    METRICS_FILE,
    EVALUATIONS_FILE,
    SAMPLES_FILE,
    ROWS,
    "checkpoints",
    "queue",
    MEMORY,
    "tensorboard",
    "trackers",
    "start_adapter",
)
"""The files that a run starting at step 1 does not take over from a previous run."""
_START = ("model.path", "lora.rank", "lora.targets", "lora.alpha", "lora.path")
"""Settings of the weights that a run begins with."""
_TRAINING = ("algorithm", "optimizer", "model", "lora")


class ResumePoint(NamedTuple):
    """A run continues after `step` steps: with the state of a checkpoint, and the steps after it trained again."""

    step: int
    checkpoint: int | None
    lines: list[str]
    """For the console: the way in which the run continues, and the reasons."""
    copy: int | None = None
    """The step of a newer copy of the state, from which fewer steps are trained again if it has the right digest."""


def finished_after(settings: RunSettings) -> int | None:
    """The number of steps of a run that is resumed and has nothing left to do; None if there is something."""
    if settings.resume != "auto":
        return None
    summary = read_summary(Path(settings.dir)) or {}
    steps = summary.get("steps", 0)
    return steps if summary.get("status") == "finished" and steps >= settings.steps else None


def prepare_folder(recipe: Recipe) -> list[str]:
    """Make the run folder ready for the processes: it has what the run continues, and nothing else of a previous run.

    Returns lines for the console. Raises `SettingError` if the run cannot continue; nothing has changed then.
    """
    run_dir = Path(recipe.run.dir)
    point = ResumePoint(0, None, [])
    if recipe.run.resume == "auto":
        point = choose_point(recipe)
    if point.step:
        _cut_folder(run_dir, point)
        return point.lines
    is_restart = recipe.run.resume == "restart"
    aside = _set_aside(run_dir, (*_OF_ONE_RUN, *((CONFIG_FILE, SUMMARY_FILE) if is_restart else ())))
    lines = ["run.resume=restart: the run starts at step 1"] if is_restart else point.lines
    if not aside:
        return lines
    start = lines[-1] if lines else f"run.dir: the run starts at step 1 in {run_dir}"
    return [*lines[:-1], f"{start}; the files of the previous run are now {', '.join(aside)}"]


def choose_point(recipe: Recipe) -> ResumePoint:
    """Where a run continues. Reads every byte of the checkpoints that it tries, and the heads of the rows' files.

    Raises `SettingError`, with every reason, if trained steps would be lost: without a checkpoint that can be used they all have
    to be trained again from `rows/`.
    """
    run_dir = Path(recipe.run.dir)
    folder = CheckpointFolder(run_dir)
    known = steps_in(run_dir / JOURNAL_FILE)
    found = {*folder.whole(), *folder.incomplete()}
    checkpoint, problems = _newest_checkpoint(folder, found, known)
    reasons = [known.problem, *problems] if known.problem else problems
    if not known.num_trained:
        if not found and not _has_lines(run_dir / METRICS_FILE):
            return ResumePoint(0, None, [f"run.resume=auto: {run_dir} has no trained step; the run starts at step 1"])
        why = "; ".join(reasons) or f"{METRICS_FILE} has steps that are not in {JOURNAL_FILE}"
        raise SettingError(f"run.resume: {why}. {_WAYS_OUT}")
    if known.num_trained > recipe.run.steps:
        raise SettingError(
            f"run.steps={recipe.run.steps}: the run in {run_dir} has trained {known.num_trained} steps; raise run.steps to continue"
        )
    changed = _changed(recipe)
    step, problem = _last_rebuilt(recipe, checkpoint, known.num_trained, changed)
    if problem and checkpoint is None:
        why = "; ".join(reasons) or "the run has none"
        raise SettingError(
            f"run.resume: the {known.num_trained} steps of the run in {run_dir} cannot be rebuilt. No checkpoint can be used:"
            f" {why}. Nor can all steps be trained again: {problem}. {_WAYS_OUT}"
        )
    copy, skipped = CopiesOnDisk(run_dir).newest(checkpoint or 0, step, recipe.roles.actor)
    point = ResumePoint(step, checkpoint, [*problems, *skipped], copy)
    lines = [*_told(folder, point, known.num_trained, problem, changed), *changed_type(recipe)]
    return point._replace(lines=lines)


_WAYS_OUT = "Set run.resume=restart to start at step 1 and keep these files under other names, or set another run.dir"


def _newest_checkpoint(folder: CheckpointFolder, found: set[int], known: KnownSteps) -> tuple[int | None, list[str]]:
    """The newest checkpoint that can be used, None without one; and what is wrong with those that are newer."""
    problems: list[str] = []
    try:
        found = found | {step for step in (folder.latest(),) if step is not None}
    except SettingError as error:
        problems.append(str(error).removeprefix("run.resume: "))
    for step in sorted(found, reverse=True):
        problem = folder.problem(step) if step in known.checkpoints else "is not in the journal"
        if not problem:
            return step, problems
        problems.append(f"{folder.path(step).name} {problem}")
    return None, problems


def _last_rebuilt(recipe: Recipe, checkpoint: int | None, num_trained: int, changed: Sequence[str]) -> tuple[int, str]:
    """The number of steps that can be rebuilt from a checkpoint, or from the initial weights, and why not more."""
    first = checkpoint or 0
    if first == num_trained:
        return first, ""
    if ":" in recipe.trainer.engine:
        return first, f"trainer.engine={recipe.trainer.engine} trains no step again"
    if start := [name for name in changed if checkpoint is None and name in _START]:
        return first, f"{', '.join(start)} had another value in the previous run"
    from ..trainer.step_log import rows_problem  # with numpy, which a line of help does not need

    for step in range(first, num_trained):
        if problem := rows_problem(Path(recipe.run.dir), step, recipe.roles.actor):
            return step, problem
    return num_trained, ""


def _told(
    folder: CheckpointFolder, point: ResumePoint, last: int, problem: str, changed: Sequence[str]
) -> Iterator[str]:
    """The lines of a run that continues, of which `last` steps were trained. The point has what is skipped, and `problem` is why not more
    steps can be rebuilt."""
    for reason in point.lines:
        yield f"run.resume=auto: {reason}; it is skipped"
    first = (point.copy or point.checkpoint or 0) + 1
    if point.copy is not None:
        start = f", from the copy of the training state in {CopiesOnDisk(folder.root.parent).path(point.copy)}"
    elif point.checkpoint is not None:
        start = f", from {folder.path(point.checkpoint)}"
    else:
        start = "; it has no checkpoint that can be used"
    again = f"; {_steps(first, point.step)} trained again from {ROWS}/" if point.step >= first else ""
    yield f"run.resume=auto: the run continues after step {point.step}{start}{again}"
    if point.step < last:
        given_up = _steps(point.step + 1, last)
        yield f"run.resume=auto: {given_up} given up, since {problem}; their files are kept under other names"
    others = [name for name in changed if name not in ("model.path", "model.dtype")]  # the type has a line of its own
    if others:
        what = "steps are trained again" if again else "the run continues"
        yield f"warning: {what} with other settings than in the previous run: {', '.join(others)}"


def _steps(first: int, last: int) -> str:
    return f"step {first} is" if first == last else f"steps {first} to {last} are"


def _changed(recipe: Recipe) -> list[str]:
    """Training settings that differ from those of the previous run; none if its recipe is of another version of the program."""
    try:
        before = read_recipe(Path(recipe.run.dir) / CONFIG_FILE)
    except SettingError:
        return []
    names = [f"{section}.{name}" for section in _TRAINING for name in getattr(recipe, section).__struct_fields__]
    if (Path(recipe.run.dir) / "start_adapter").exists():
        names.remove("lora.path")  # the run keeps the adapter that it began with
    value_of = attrgetter(*names)
    both = zip(names, value_of(recipe), value_of(before), strict=True)
    return [name for name, value, other in both if value != other]


def _cut_folder(run_dir: Path, point: ResumePoint) -> None:
    """Make the folder that of a run which has trained `point.step` steps. Raises `SettingError`."""
    from ..trainer.step_log import saved_steps

    number = _free_number(run_dir)
    folder = CheckpointFolder(run_dir)
    journal = run_dir / JOURNAL_FILE
    if Journal.is_in_use(journal):
        raise SettingError(f"run.dir: {journal} is in use by another process; end that run, or set another run.dir")
    _keep_ends(run_dir, point.step, number)
    given_up = {path: step for path, step in saved_steps(run_dir) if step >= point.step}
    num_trained = steps_in(journal).num_trained
    if given_up and num_trained > point.step:
        (aside := _discarded(run_dir / ROWS, number)).mkdir()
        for path in given_up:
            path.rename(aside / path.name)
    for path in given_up:
        path.unlink(missing_ok=True)  # of the step under way at the end, which no journal knows
    copies = CopiesOnDisk(run_dir)
    # Of no use: those that are older than the checkpoint, and those of a step that no journal knows. Others stay: the newest may be damaged.
    copies.remove(step for step in copies.steps() if not (point.checkpoint or 0) < step <= num_trained)
    for name in ("checkpoints", "queue", MEMORY):  # else the new steps of these numbers would seem to have them
        later = [path for path in (run_dir / name).glob("step_*") if number_of(path.name) > point.step]
        for path in later:
            (aside := _discarded(run_dir / name, number)).mkdir(exist_ok=True)
            path.rename(aside / path.name)
    try:
        cut_after(journal, point.step, point.checkpoint, _discarded(journal, number))
    except JournalError as error:
        raise SettingError(f"run.dir: {error}") from error
    if point.checkpoint is None:
        folder.clear_latest()
    else:
        folder.set_latest(point.checkpoint)


def _keep_ends(run_dir: Path, step: int, number: int) -> None:
    """Copy the metrics and samples of the steps that are given up, from `step` on, counted from 0; the trainer cuts them off."""
    metrics, samples = run_dir / METRICS_FILE, run_dir / SAMPLES_FILE
    for path, lines in (
        (metrics, _lines_from(metrics, step)),
        (samples, whole_lines(samples, lambda each: each > step)),
    ):
        if rest := list(lines):
            _discarded(path, number).write_bytes(b"".join(rest))


def _lines_from(metrics: Path, step: int) -> Iterator[bytes]:
    """The lines of the metrics from a step on; each step has one."""
    if metrics.exists():
        with metrics.open("rb") as file:
            yield from itertools.islice(file, step, None)


def _has_lines(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _set_aside(run_dir: Path, names: Iterable[str]) -> list[str]:
    """Give the files and folders with these names other ones; returns those."""
    number = _free_number(run_dir)
    aside = list[str]()
    for path in (run_dir / name for name in names):
        if path.exists():
            aside.append(path.rename(_discarded(path, number)).name)
    return aside


def _free_number(run_dir: Path) -> int:
    return next(number for number in itertools.count(1) if not any(run_dir.glob(f"*.discarded-{number}")))


def _discarded(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.discarded-{number}")
