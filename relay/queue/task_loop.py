"""The process of the user's tasks: functions that add columns to rows before training.

Consumes rows of `queue.tasks`; waits for the hub only; woken by its answers. Every such process serves all tasks.
"""

from collections.abc import Callable

import numpy as np

from ...comm.errors import SettingError
from ...comm.fleet import Fleet
from ...comm.messages import HeldRows
from ...comm.plugins import load_object
from ...comm.recipe import Recipe, TaskSettings
from .batch import Batch
from .replicated_rows import ReplicatedRows
from .stream import ExperienceStream

TaskColumns = dict[str, list[np.ndarray]]


def run(fleet: Fleet, recipe: Recipe) -> None:
    """Run the process until the hub ends the run."""
    tasks = {task.name: task for task in recipe.queue.tasks}
    functions = {name: load_object("queue.tasks", task.function) for name, task in tasks.items()}
    mailbox = fleet.open_mailbox(fleet.name)
    storage = ReplicatedRows(fleet)
    stream = ExperienceStream(mailbox, storage, list(tasks)).start()
    for batch in stream:
        stream.put(batch, apply_task(tasks[batch.task], functions[batch.task], batch))
    stream.close()
    mailbox.send("hub", HeldRows([], []))
    storage.close()
    mailbox.close()


def apply_task(task: TaskSettings, function: Callable[[TaskColumns], TaskColumns], batch: Batch) -> TaskColumns:
    """The new columns of a batch, a list of one array for each row. Raises `SettingError` if they differ from `task.yields`."""
    try:
        found = function({column: batch[column] for column in task.needs})
    except Exception as error:
        raise SettingError(f"queue.tasks: {task.function} raised {type(error).__name__}: {error}") from error
    if not isinstance(found, dict) or set(found) != set(task.yields):
        raise SettingError(f"queue.tasks: {task.function} must return a dictionary of {task.yields}")
    columns = {name: [np.asarray(value) for value in values] for name, values in found.items()}
    for name, values in columns.items():
        if len(values) != len(batch):
            raise SettingError(
                f"queue.tasks: {task.function} returned {len(values)} values of {name} for {len(batch)} rows"
            )
    return columns
