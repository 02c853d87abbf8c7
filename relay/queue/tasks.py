"""The tasks of a run, from its recipe.

`reward` is done where a trajectory ends, in the rollout's process pool: its column comes with the row. `train` is last: a row
leaves the queue with it, so it waits for every column that any other task yields.
"""

from ...comm.errors import SettingError
from ...comm.plugins import load_object
from ...comm.recipe import AlgorithmSettings, QueueSettings, TaskSettings
from .batch import TRAIN
from .controller import Task
from .samplers import Sampler

REFERENCE = Task("reference", yields=("ref_logprobs",))
"""Log-probabilities of the initial policy, for a KL term in the loss."""
ROLLOUT_COLUMNS = ("prompt_ids", "response_ids", "rollout_logprobs", "versions", "loss_mask", "reward")
"""What a row begins with."""


def pipeline(queue: QueueSettings, algorithm: AlgorithmSettings) -> dict[str, Task]:
    """The tasks by name. Raises `SettingError` for a task of the user's that cannot be."""
    tasks = {task.name: task for task in (REFERENCE,) if algorithm.kl_coef > 0}
    known = {column for task in tasks.values() for column in task.yields}
    for settings in queue.tasks:
        task = _users_task(settings, known | set(ROLLOUT_COLUMNS))
        if task.name in tasks or task.name in (TRAIN, "reward"):
            raise SettingError(f"queue.tasks: there is a task {task.name!r} already")
        known |= set(task.yields)
        tasks[task.name] = task
    return tasks | {TRAIN: Task(TRAIN, needs=frozenset(known))}


def open_sampler(path: str) -> Sampler | None:
    """The user's sampler for the groups in training; None where the recipe names none."""
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
    unknown = set(settings.needs) - known
    if unknown:
        raise SettingError(
            f"queue.tasks: task {settings.name!r} needs {sorted(unknown)}, which nothing before it yields"
        )
    twice = set(settings.yields) & known
    if twice:
        raise SettingError(f"queue.tasks: task {settings.name!r} yields {sorted(twice)}, which is there already")
    needs = frozenset(settings.needs) - set(ROLLOUT_COLUMNS)
    return Task(settings.name, needs, tuple(settings.yields))
