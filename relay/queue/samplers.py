"""The interface of `queue.sampler`: which of the groups that can be trained the trainer gets next.

The contract: `sample` is pure. It returns some of `candidates`, each at most once, in the order in which they are handed out,
and no more than fits into `budget`.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...comm.messages.base import GroupId


class Candidate(NamedTuple):
    """The finished samples of a group; `lease_order` counts first leases, `num_missing` counts unfinished members."""

    group: GroupId
    samples: tuple[int, ...]
    lease_order: int
    version: int
    num_tokens: int
    rewards: tuple[float, ...]
    num_missing: int = 0


class Budget(NamedTuple):
    """Most groups, and most tokens (a single group may have more); `step` is the one in training."""

    items: int
    tokens: int
    step: int


class Sampler(Protocol):
    """The contract is the module's docstring."""

    def sample(self, candidates: Sequence[Candidate], budget: Budget) -> Sequence[Candidate]:
        """The candidates to hand out now."""
        ...
