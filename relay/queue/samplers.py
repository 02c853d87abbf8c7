"""Samplers: which of the ready items a task gets next. An item is a row, or for a task on groups a whole group.

The contract: `sample` is pure; it returns some of `items`, each at most once, in the order in which they are to go out, and
no more than fits into `room`. The controller offers only what is ready and what the task has not had, so a sampler cannot
hand anything out twice, and a slow member of one group holds up no other.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...comm.messages.base import GroupId


class Candidate(NamedTuple):
    """What a task may get: samples of a group; `lease_order` counts first leases, `num_missing` members that are unfinished."""

    group: GroupId
    samples: tuple[int, ...]
    lease_order: int
    version: int
    num_tokens: int
    rewards: tuple[float, ...]
    num_missing: int = 0


class Budget(NamedTuple):
    """How much may go out: items and tokens at most, of which one item may have more; `step` is the one in training."""

    items: int
    tokens: int
    step: int


class Sampler(Protocol):
    """The contract is the module's docstring."""

    def sample(self, candidates: Sequence[Candidate], budget: Budget) -> Sequence[Candidate]:
        """The items to hand out now."""
        ...


class Fifo:
    """The oldest first, as many as fit."""

    def sample(self, candidates: Sequence[Candidate], budget: Budget) -> Sequence[Candidate]:
        """Stops at the first that does not fit: nobody is overtaken."""
        return fitting(sorted(candidates, key=lambda item: (item.lease_order, item.samples)), budget)


class TokenBalanced:
    """For consumers that ask one by one: to each the largest of as many equal parts as there are consumers."""

    def __init__(self, num_consumers: int) -> None:
        self._num_consumers = num_consumers

    def sample(self, candidates: Sequence[Candidate], budget: Budget) -> Sequence[Candidate]:
        """The heaviest part, as far as it fits."""
        if not candidates:
            return []
        parts = balanced([item.num_tokens for item in candidates], self._num_consumers)
        heaviest = max(parts, key=lambda part: sum(candidates[index].num_tokens for index in part))
        return Fifo().sample([candidates[index] for index in heaviest], budget)


def fitting(candidates: Sequence[Candidate], budget: Budget) -> Sequence[Candidate]:
    """The first of these items that fit into the room."""
    chosen: list[Candidate] = []
    tokens = 0
    for item in candidates[: budget.items]:
        if chosen and tokens + item.num_tokens > budget.tokens:
            break
        chosen.append(item)
        tokens += item.num_tokens
    return chosen


def balanced(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices of `sizes` in parts of nearly equal sums: the better of largest differencing and of dealing out greedily."""
    return min(_differenced(sizes, num_parts), _dealt(sizes, num_parts), key=lambda parts: _heaviest(parts, sizes))


def _heaviest(parts: list[list[int]], sizes: Sequence[int]) -> int:
    return max(sum(sizes[index] for index in part) for part in parts)


def _dealt(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """The largest first, to the part that is lightest so far (Graham, 1969)."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    sums = [0] * num_parts
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        part = sums.index(min(sums))
        parts[part].append(index)
        sums[part] += sizes[index]
    return parts


def _differenced(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Largest differencing (Karmarkar and Karp, 1982): the two partitions that differ most within themselves are merged, the
    heaviest part of one with the lightest of the other, until one is left."""
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, size in enumerate(sizes):
        parts = [(0, []) for _ in range(num_parts - 1)] + [(size, [index])]
        heap.append((-size, index, parts))
    heapq.heapify(heap)
    number = len(sizes)
    while len(heap) > 1:
        left, right = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = sorted(
            ((a + b, x + y) for (a, x), (b, y) in zip(left, reversed(right), strict=True)), key=lambda part: part[0]
        )
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], number, merged))
        number += 1
    return [part for _, part in heap[0][2]] if heap else [[] for _ in range(num_parts)]
