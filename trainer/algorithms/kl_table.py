"""How far the policy in training is from the one that generated the tokens: the KL divergence by age and by depth.

Age is the staleness of a token, depth its place in its response. A fault of the generator often grows with depth; a policy that
moves too fast, or tokens that are too old, show by age.
"""

from itertools import pairwise

import torch
from torch import Tensor

from ..batch import PackedBatch
from .kl import k3

AGE_STARTS = (0, 1, 2, 3, 5, 9)
"""First staleness of each range."""
DEPTH_STARTS = (0, 16, 64, 256, 1024, 4096)
"""First place of each range: a response of any length has few of them, and a place is in the same range in every run."""


def _labels(starts: tuple[int, ...]) -> list[str]:
    ends = [f"{first}" if after == first + 1 else f"{first}-{after - 1}" for first, after in pairwise(starts)]
    return [*ends, f"{starts[-1]}+"]


NAMES = (
    *(f"kl/age/{label}" for label in _labels(AGE_STARTS)),
    *(f"kl/depth/{label}" for label in _labels(DEPTH_STARTS)),
)
"""The metric of each range."""


class KLTable:
    """Sums over the tokens with loss in each range. They stay on the device of the batches, and are read once for each step."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        """[ranges, 2] float64: the number of tokens, and the sum of their KL divergences."""

    def add(self, batch: PackedBatch, logprobs: Tensor) -> None:
        """Add a micro-batch: logprobs [R] of the policy in training, without gradient.

        The divergence of the generating policy b from the one in training is estimated by k3, p / b - 1 - log(p / b).
        """
        has_loss = batch.mask > 0
        kl = torch.where(has_loss, k3(batch.rollout_logprobs, logprobs), 0.0)
        is_in = torch.cat([_ranges(batch.staleness, AGE_STARTS), _ranges(batch.positions, DEPTH_STARTS)])
        columns = torch.stack([has_loss.to(kl.dtype), kl], dim=1)
        sums = is_in.double() @ columns.double()
        self._sums = sums if self._sums is None else self._sums + sums

    def totals(self) -> list[float]:
        """The sums of this rank as a list, which `kl_metrics` reads."""
        return [0.0] * (2 * len(NAMES)) if self._sums is None else self._sums.flatten().tolist()


def _ranges(values: Tensor, starts: tuple[int, ...]) -> Tensor:
    """[ranges, R] bool: the range of each of the values [R]. Written so that no device waits for the host."""
    is_from = torch.stack([values >= start for start in starts])
    is_beyond = torch.cat([is_from[1:], torch.zeros_like(is_from[:1])])
    return is_from & ~is_beyond


def kl_metrics(totals: list[float]) -> dict[str, float]:
    """The mean divergence of each range that has tokens, from the totals of all ranks."""
    pairs = zip(totals[::2], totals[1::2], strict=True)
    return {name: total / count for name, (count, total) in zip(NAMES, pairs, strict=True) if count}
