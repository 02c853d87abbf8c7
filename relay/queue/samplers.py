"""Samplers: which of the ready candidates a task gets next. A candidate is a row, or a whole group for a task on groups.

The contract: `sample` is pure. It returns some of `candidates`, each at most once, in the order in which they are handed out,
and no more than fits into `budget`. The controller offers only rows that are ready and that the task has not had, so a sampler
cannot hand out a row twice, and a slow member of one group does not delay another group.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...comm.messages.base import GroupId
from .micro_batches import balanced


class Candidate(NamedTuple):
    """Samples of a group for a task; `lease_order` counts first leases, `num_missing` counts unfinished members."""

    group: GroupId
    samples: tuple[int, ...]
    lease_order: int
    version: int
    num_tokens: int
    rewards: tuple[float, ...]
    num_missing: int = 0


class Budget(NamedTuple):
    """Most items and tokens of one answer (a single item may have more tokens); `step` is the one in training."""

    items: int
    tokens: int
    step: int


class Sampler(Protocol):
    """The contract is the module's docstring."""

    def sample(self, candidates: Sequence[Candidate], budget: Budget) -> Sequence[Candidate]:
        """The candidates to hand out now."""
        ...


class Fifo:
    """The oldest first, as many as fit. It stops at the first that does not fit: no candidate is overtaken."""

    def sample(self, candidates: Sequence[Candidate], budget: Budget) -> Sequence[Candidate]:
        chosen: list[Candidate] = []
        tokens = 0
        for candidate in sorted(candidates, key=lambda each: (each.lease_order, each.samples))[: budget.items]:
            if chosen and tokens + candidate.num_tokens > budget.tokens:
                break
            chosen.append(candidate)
            tokens += candidate.num_tokens
        return chosen


class TokenBalanced:
    """For consumers that ask one by one: the candidates in equal parts, one for each consumer; the heaviest goes out."""

    def __init__(self, num_consumers: int) -> None:
        self._num_consumers = num_consumers

    def sample(self, candidates: Sequence[Candidate], budget: Budget) -> Sequence[Candidate]:
        if not candidates:
            return []
        parts = balanced([item.num_tokens for item in candidates], self._num_consumers)
        heaviest = max(parts, key=lambda part: sum(candidates[index].num_tokens for index in part))
        return Fifo().sample([candidates[index] for index in heaviest], budget)
