"""Shares of rows for the ranks of a task, in rounds of one micro-batch per rank: sharded ranks must run equally many."""

from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from ...comm.messages.base import GroupId
from ...comm.messages.queue import RowRef

SHORTEST_PREFIX = 4
"""Tokens that rows must have in common, at least, to be computed together: a branch costs a few calls in each layer."""
LEAST_RATIO = 1.05
"""Tokens of a micro-batch's rows for each token that is computed, at least: with fewer in common the rows alone are faster."""


class Sized(Protocol):
    """An item with `num_tokens` of prompt and response."""

    @property
    def num_tokens(self) -> int: ...


S = TypeVar("S", bound=Sized)


def balanced(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices of `sizes` in parts of nearly equal sums: the largest first, each to the lightest part so far (Graham, 1969).

    The heaviest part is at most 4/3 of the best possible one. With 16 or more trajectories a part, it is typically within 1 % of it.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    sums = [0] * num_parts
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        part = sums.index(min(sums))
        parts[part].append(index)
        sums[part] += sizes[index]
    return parts


def rounds(items: Sequence[S], num_ranks: int, max_tokens: int) -> list[list[list[S]]]:
    """Micro-batches by round and rank: at most `max_tokens` each (a longer item stays whole), with nearly equal tokens for each rank.

    The longest items come first, so that lengths within a micro-batch are alike. A rank without a micro-batch in the last
    rounds has an empty one.
    """
    return _dealt([_Part([item], item.num_tokens, 0) for item in items], num_ranks, max_tokens)


def tree_rounds(
    rows: Sequence[RowRef], num_ranks: int, max_tokens: int, longest_in_tree: int
) -> list[list[list[RowRef]]]:
    """`rounds` for a trainer that computes what a group's rows have in common once, if no row is longer than `longest_in_tree`.

    A token counts once for each time that it is computed, and an eighth for each other row that has it: attention may gather the keys
    of each row, which take at most this share of a layer's memory. So a group stays whole where it fits into a micro-batch, unless
    its parts make the ranks' shares more even.
    """
    if not rows or max(row.num_tokens for row in rows) > longest_in_tree:
        return rounds(rows, num_ranks, max_tokens)
    groups: dict[GroupId, list[RowRef]] = {}
    for row in sorted(rows, key=lambda row: -row.num_tokens):
        groups.setdefault(row.row.group, []).append(row)
    parts = [part for group in groups.values() for part in _cut(group, max_tokens)]
    if all(part.num_computed == part.num_tokens for part in parts):
        return rounds(rows, num_ranks, max_tokens)  # rows fill micro-batches better than groups do
    return _dealt(_evened(parts, num_ranks), num_ranks, max_tokens)


class _Part(NamedTuple, Generic[S]):
    """Items that stay together: their tokens, of which `num_repeated` need not be computed again."""

    items: list[S]
    num_tokens: int
    num_repeated: int

    @property
    def num_computed(self) -> int:
        """Tokens that take time."""
        num_computed = self.num_tokens - self.num_repeated
        return self.num_tokens if self.num_tokens < LEAST_RATIO * num_computed else num_computed

    @property
    def size(self) -> int:
        """Tokens toward `max_tokens`, by the memory that they take."""
        return self.num_computed + -(-(self.num_tokens - self.num_computed) // 8)

    def with_(self, other: "_Part[S]") -> "_Part[S]":
        sums = (one + more for one, more in zip(self[1:], other[1:], strict=True))
        return _Part(self.items + other.items, *sums)


def _of_group(rows: list[RowRef]) -> _Part[RowRef]:
    """Rows of one group, which share their prompt."""
    prompt = rows[0].num_prompt_tokens
    repeated = prompt * (len(rows) - 1) if prompt >= SHORTEST_PREFIX else 0
    return _Part(rows, sum(row.num_tokens for row in rows), repeated)


def _cut(rows: list[RowRef], max_tokens: int) -> Iterator[_Part[RowRef]]:
    """A group's rows in parts of at most `max_tokens` each, in the same order."""
    part = rows[:1]
    for row in rows[1:]:
        if _of_group([*part, row]).size > max_tokens:
            yield _of_group(part)
            part = []
        part.append(row)
    yield _of_group(part)


def _evened(whole: list[_Part[RowRef]], num_ranks: int) -> list[_Part[RowRef]]:
    """The parts, some of them divided where this makes the heaviest rank's share smaller by a sixteenth: ranks wait for each other.

    Of each of the heaviest ranks the largest part that can be divided is: in two, then in three, and so on. Of equal shares none becomes
    smaller alone, so the best division is kept. Each one computes more; they end where even equal shares would not be small enough.
    """
    numbers = [1] * len(whole)
    best, least = whole, 0
    while True:
        origins, parts = zip(*_divided(whole, numbers), strict=True)
        shares = balanced([part.num_computed for part in parts], num_ranks)
        loads = [sum(parts[index].num_computed for index in share) for share in shares]
        heaviest = max(loads)
        if not least or 16 * heaviest <= 15 * least:
            best, least = list(parts), heaviest
        chosen: set[int] = set()
        for share, load in zip(shares, loads, strict=True):
            divisible = [index for index in share if len(parts[index].items) > 1]
            if divisible and 16 * load >= 15 * heaviest:
                chosen.add(origins[max(divisible, key=lambda index: parts[index].num_computed)])
        if not chosen or 16 * sum(loads) > 15 * least * num_ranks:
            return best
        numbers = [number + (index in chosen) for index, number in enumerate(numbers)]


def _divided(whole: list[_Part[RowRef]], numbers: list[int]) -> Iterator[tuple[int, _Part[RowRef]]]:
    """Each part in so many ones of about equal size, with its index."""
    for index, (part, number) in enumerate(zip(whole, numbers, strict=True)):
        for first in range(number):
            yield index, _of_group(part.items[first::number])


def _dealt(parts: Sequence[_Part[S]], num_ranks: int, max_tokens: int) -> list[list[list[S]]]:
    """Micro-batches of whole parts by round and rank."""
    if not parts:
        return []
    shares = balanced([part.num_computed for part in parts], num_ranks)
    largest_first = [[parts[i] for i in sorted(share, key=lambda i: (-parts[i].num_computed, i))] for share in shares]
    ranks = [list(_micro_batches(share, max_tokens)) for share in largest_first]
    return [[rank[i].items if i < len(rank) else [] for rank in ranks] for i in range(max(map(len, ranks)))]


def _micro_batches(parts: Sequence[_Part[S]], max_tokens: int) -> Iterator[_Part[S]]:
    """Parts joined to some of at most `max_tokens` tokens each, in the same order."""
    joined: _Part[S] | None = None
    for part in parts:
        if joined is not None and joined.with_(part).size > max_tokens:
            yield joined
            joined = None
        joined = part if joined is None else joined.with_(part)
    if joined is not None:
        yield joined
