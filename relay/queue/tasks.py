"""The tasks of a run, from its recipe, and which rows are ready for each, column by column.

`reward` runs in the rollout's process pool when a trajectory ends: its column is part of the new row. `train` is last: it
removes rows from the queue, so it waits for the columns of all other tasks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...comm.errors import SettingError
from ...comm.messages.queue import GroupRef
from ...comm.plugins import load_object
from ...comm.recipe import AlgorithmSettings, QueueSettings, TaskSettings
from ..journal.hub_state import HubState
from ..journal.records import Group, RowStatus, TaskRecord
from .batch import TRAIN
from .micro_batches import balanced
from .samplers import Sampler


@dataclass(frozen=True, slots=True)
class Task:
    """A consumer of rows: it gets rows that have the columns it `needs`, and adds those it `yields`.

    `needs` names only columns of other tasks: a row has those of its rollout from the start.
    """

    name: str
    needs: frozenset[str] = frozenset()
    yields: tuple[str, ...] = ()


REFERENCE = Task("reference", yields=("ref_logprobs",))
"""Log-probabilities of the initial policy, for the KL term of the loss."""
ROLLOUT_COLUMNS = (
    "prompt_ids",
    "response_ids",
    "rollout_logprobs",
    "versions",
    "weight_digests",
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


def next_rows(
    task: Task, state: HubState, max_tokens: int, num_consumers: int = 1, *, has_trees: bool = False
) -> list[GroupRef]:
    """The rows that a consumer of a task gets now, by group; empty if none is ready. has_trees: of its request.

    Ready are rows that have the columns the task needs, were not handed to it, and are not in training yet. Only the task's own
    events change its record, so each row is handed out once. A slow member of a group does not delay the others.
    """
    assigned = state.tasks.get(task.name, TaskRecord()).assigned
    ready = [
        (group, sample)
        for group in sorted(state.queued(), key=lambda group: group.lease_order)
        for sample in group.samples(RowStatus.READY)
        if group.rows[sample].columns >= task.needs and group.row_id(sample) not in assigned
    ]
    chosen: dict[int, tuple[Group, list[int]]] = {}
    sizes = [group.rows[sample].num_tokens for group, sample in ready]
    prompts = [(group.lease_order, group.rows[sample].num_prompt_tokens if has_trees else 0) for group, sample in ready]
    for group, sample in (ready[index] for index in equal_share(sizes, num_consumers, max_tokens, prompts)):
        chosen.setdefault(group.lease_order, (group, []))[1].append(sample)
    return [group_ref_of(group, samples) for group, samples in chosen.values()]


def equal_share(
    sizes: Sequence[int], num_consumers: int, max_tokens: int, prompts: Sequence[tuple[int, int]] = ()
) -> list[int]:
    """Indices of the items that one of several consumers gets, which ask one by one.

    All items are divided into equal parts, one for each consumer. The heaviest goes out: its first items, as many as fit into
    `max_tokens`, at least one. It stops at the first that does not fit, so no item is overtaken. prompts: for each item the group with
    which it shares its first tokens, and how many; those of the first one alone count toward `max_tokens`.
    """
    parts = balanced(sizes, num_consumers)
    heaviest = max(parts, key=lambda part: sum(sizes[index] for index in part))
    share: list[int] = []
    num_tokens = 0
    seen: set[tuple[int, int]] = set()
    for index in sorted(heaviest):
        num_tokens += sizes[index]
        if prompts:
            num_tokens -= prompts[index][1] if prompts[index] in seen else 0
            seen.add(prompts[index])
        if share and num_tokens > max_tokens:
            break
        share.append(index)
    return share


def group_ref_of(group: Group, samples: list[int]) -> GroupRef:
    """The metadata of these samples of a group that a consumer gets."""
    rows = [group.rows[sample] for sample in samples]
    prompts = {row.num_prompt_tokens for row in rows}
    return GroupRef(
        group=group.id,
        samples=samples,
        attempts=[row.attempt for row in rows],
        storage_ids=[row.storage_ids for row in rows],
        versions=[row.version for row in rows],
        num_tokens=[row.num_tokens for row in rows],
        rewards=[row.reward for row in rows],
        num_prompt_tokens=prompts.pop() if len(prompts) == 1 else 0,  # others are not one prompt
    )


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
