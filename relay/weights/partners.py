"""Which actor rank keeps a second copy of another one's training state, on the next host. Without torch."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Partners(NamedTuple):
    """Two ranks on other hosts."""

    keeper: int
    """The one that keeps this rank's copies."""
    kept: int
    """The one whose copies this rank keeps."""


def partners(rank: int, hosts: Sequence[Hashable]) -> Partners | None:
    """The partners of a rank, given each rank's host: each host's ranks have theirs on the next host, the last one's on the first.

    None where all are on one host, and where the hosts have different numbers of ranks, since all memories have one size.
    """
    ranks_of: dict[Hashable, list[int]] = {}
    for each, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(each)
    groups = [*ranks_of.values()]
    if len(groups) < 2 or len({len(group) for group in groups}) > 1:
        return None
    number = next(index for index, group in enumerate(groups) if rank in group)
    place = groups[number].index(rank)
    return Partners(groups[(number + 1) % len(groups)][place], groups[number - 1][place])
