"""The tasks of a run, from its recipe.

`reward` runs in the rollout's process pool when a trajectory ends: its column is part of the new row. `train` is last: it
removes rows from the queue, so it waits for the columns of all other tasks.
"""

from ...comm.errors import SettingError
from ...comm.plugins import load_object
from ...comm.recipe import AlgorithmSettings, QueueSettings, TaskSettings
from .batch import TRAIN
from .samplers import Sampler
from .task_controller import Task

REFERENCE = Task("reference", yields=("ref_logprobs",))
"""Log-probabilities of the initial policy, for the KL term of the loss."""
ROLLOUT_COLUMNS = (
    "prompt_ids",
    "response_ids",
    "rollout_logprobs",
    "versions",
    "loss_mask",
    "reward",
    "truncated",
    "reward_info",
)
"""The columns that a rollout writes."""


def pipeline(queue: QueueSettings, algorithm: AlgorithmSettings) -> dict[str, Task]:
    """The tasks by name. Raises `SettingError` for an invalid task of the user's."""
    tasks = {task.name: task for task in (REFERENCE,) if algorithm.kl_coef > 0}
    known = {column for task in tasks.values() for column in task.yields}
    for settings in queue.tasks:
        task = _users_task(settings, known | set(ROLLOUT_COLUMNS))
        if task.name in tasks or task.name in (TRAIN, "reward"):
            raise SettingError(f"queue.tasks: task {task.name!r} exists already")
        known |= set(task.yields)
        tasks[task.name] = task
    return tasks | {TRAIN: Task(TRAIN, needs=frozenset(known))}


def open_sampler(path: str) -> Sampler | None:
    """The user's sampler of groups for training; None if the recipe does not name one."""
    if not path:
        return None
    sampler = load_object("queue.sampler", path)()
    if not hasattr(sampler, "sample"):
        raise SettingError(f"queue.sampler: {path} has no method `sample`; see headrace.relay.queue.samplers")
    return sampler


def _users_task(settings: TaskSettings, known: set[str]) -> Task:
    if not settings.name.isidentifier():
        raise SettingError(f"queue.tasks: a task needs a name, not {settings.name!r}")
    if not settings.yields:
        raise SettingError(f"queue.tasks: task {settings.name!r} yields no column")
    if any("/" in column for column in settings.yields):  # it ends the key in the names of files of rows
        raise SettingError(f"queue.tasks: task {settings.name!r} yields {settings.yields}; a column's name has no '/'")
    unknown = set(settings.needs) - known
    if unknown:
        raise SettingError(
            f"queue.tasks: task {settings.name!r} needs {sorted(unknown)}, but no task before it yields them"
        )
    twice = set(settings.yields) & known
    if twice:
        raise SettingError(
            f"queue.tasks: task {settings.name!r} yields {sorted(twice)}, which an earlier task or the rollout yields"
        )
    needs = frozenset(settings.needs) - set(ROLLOUT_COLUMNS)
    return Task(settings.name, needs, tuple(settings.yields))
