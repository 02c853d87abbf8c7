"""Who of a task's ranks gets what: rounds of one micro-batch per rank, since sharded ranks must run equally many."""

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from .samplers import balanced


class Sized(Protocol):
    """Something with tokens."""

    @property
    def num_tokens(self) -> int:
        """Of prompt and response."""
        ...


S = TypeVar("S", bound=Sized)


def rounds(items: Sequence[S], num_ranks: int, max_tokens: int) -> list[list[list[S]]]:
    """By round and rank: shares of nearly equal tokens, each in parts of at most `max_tokens` (a longer item stays whole).

    Alike in length within a part, the longest first. A rank without a part in the last rounds has an empty one.
    """
    if not items:
        return []
    shares = balanced([item.num_tokens for item in items], num_ranks)
    longest_first = [[items[i] for i in sorted(share, key=lambda i: (-items[i].num_tokens, i))] for share in shares]
    parts = [list(micro_batches(share, max_tokens)) for share in longest_first]
    return [[part[i] if i < len(part) else [] for part in parts] for i in range(max(map(len, parts)))]


def micro_batches(items: Sequence[S], max_tokens: int) -> Iterator[list[S]]:
    """Split into parts of at most `max_tokens` tokens each, keeping the order."""
    part: list[S] = []
    size = 0
    for item in items:
        if part and size + item.num_tokens > max_tokens:
            yield part
            part, size = [], 0
        part.append(item)
        size += item.num_tokens
    if part:
        yield part
