"""A controller for each task: which rows are ready for it, column by column, and which are handed out next."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...comm.messages.queue import GroupRef
from ..journal.hub_state import HubState
from ..journal.records import Group, RowStatus, TaskRecord
from .samplers import Budget, Candidate, Fifo, Sampler


@dataclass(frozen=True, slots=True)
class Task:
    """A consumer of rows: it gets rows that have the columns it `needs`, and adds those it `yields`.

    `needs` names only columns of other tasks: a row has those of its rollout from the start.
    """

    name: str
    needs: frozenset[str] = frozenset()
    yields: tuple[str, ...] = ()


class Controller:
    """Hands out a task's rows, each once: only the task's own events change its record in the hub's state."""

    def __init__(self, task: Task, sampler: Callable[[int], Sampler] | None = None) -> None:
        self.task = task
        self._sampler_for = sampler or (lambda num_consumers: Fifo())

    def ready(self, state: HubState) -> Iterator[Candidate]:
        """Rows that have the columns the task needs, were not handed to it, and are not in training yet."""
        record = state.tasks.get(self.task.name, TaskRecord())
        for group in state.queued():
            for sample in group.samples(RowStatus.READY):
                row = group.rows[sample]
                if row.columns >= self.task.needs and group.row_id(sample) not in record.assigned:
                    yield Candidate(group.id, (sample,), group.lease_order, row.version, row.num_tokens, (row.reward,))

    def next(self, state: HubState, max_tokens: int, num_consumers: int = 1) -> list[GroupRef]:
        """The rows to hand out now, by group; empty if none is ready."""
        items = list(self.ready(state))
        sampler = self._sampler_for(num_consumers)
        chosen = sampler.sample(items, Budget(len(items), max_tokens, state.step))
        assert set(chosen) <= set(items) and len(set(chosen)) == len(chosen), f"sampler of {self.task.name}"
        by_group: dict[int, list[int]] = {}
        for item in chosen:
            by_group.setdefault(item.lease_order, []).extend(item.samples)
        groups = {group.lease_order: group for group in state.queued()}
        return [group_ref_of(groups[order], samples) for order, samples in by_group.items()]


def candidate_of(group: Group) -> Candidate:
    """A group as a sampler's candidate, with its finished samples."""
    samples = tuple(group.samples(RowStatus.READY))
    rows = [group.rows[sample] for sample in samples]
    missing = len(group.samples(RowStatus.WANTED, RowStatus.LEASED))
    num_tokens = sum(row.num_tokens for row in rows)
    return Candidate(
        group.id, samples, group.lease_order, group.version, num_tokens, tuple(row.reward for row in rows), missing
    )


def group_ref_of(group: Group, samples: list[int]) -> GroupRef:
    """The metadata of these samples of a group that a consumer gets."""
    rows = [group.rows[sample] for sample in samples]
    return GroupRef(
        group=group.id,
        samples=samples,
        attempts=[row.attempt for row in rows],
        storage_ids=[row.storage_ids for row in rows],
        versions=[row.version for row in rows],
        num_tokens=[row.num_tokens for row in rows],
        rewards=[row.reward for row in rows],
    )
