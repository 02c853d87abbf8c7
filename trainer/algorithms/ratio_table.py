"""The importance ratios of a step's tokens, counted in intervals of their logarithm."""

import torch
from torch import Tensor

_OUT = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)
_LARGEST = 20.0
EDGES = (-_LARGEST, *(-edge for edge in reversed(_OUT)), *_OUT, _LARGEST)
"""Of the intervals of log(p / b): the policy in training over the one that generated. The outer intervals have all beyond, too."""


class RatioTable:
    """Numbers of tokens with loss. They stay on the device of the batches, and are read once for each step."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None
        """[intervals] float64"""
        self._inner: Tensor | None = None

    def add(self, log_ratios: Tensor, mask: Tensor) -> None:
        """Add a micro-batch: log-ratios [R], where mask [R] is set. Those that are not finite are in an outer interval."""
        if self._counts is None or self._inner is None:
            self._inner = torch.tensor(EDGES[1:-1], device=log_ratios.device, dtype=log_ratios.dtype)
            self._counts = torch.zeros(len(EDGES) - 1, device=log_ratios.device, dtype=torch.float64)
        self._counts.scatter_add_(0, torch.bucketize(log_ratios, self._inner), mask.double())

    def totals(self) -> list[float]:
        """The numbers of this rank, one for each interval."""
        return [0.0] * (len(EDGES) - 1) if self._counts is None else self._counts.tolist()
