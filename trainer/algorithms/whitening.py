"""Whitening of the advantages of a step over all its tokens with loss, on all ranks."""

from collections.abc import Callable, Sequence

import numpy as np

EPS = 1e-8
"""Added to the variance, as in verl."""
_EQUAL = 1e-16
"""A variance below it is the rounding error of equal numbers."""


def whitened(
    advantages: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    all_reduce_sum: Callable[[list[float]], list[float]],
) -> list[np.ndarray]:
    """(A - mean) / sqrt(variance + 1e-8) over the tokens with loss (REINFORCE++, arXiv 2501.03262; verl's `masked_whiten`).

    advantages, masks: [R] of each response of this rank; `all_reduce_sum` adds numbers over the ranks. The variance is the
    unbiased one. Equal advantages become exact zeros.
    """
    kept = [values[mask != 0].astype(np.float64) for values, mask in zip(advantages, masks, strict=True)]
    count, total = all_reduce_sum([float(sum(map(len, kept))), float(sum(part.sum() for part in kept))])
    mean = total / max(count, 1.0)
    (squares,) = all_reduce_sum([float(sum(np.square(part - mean).sum() for part in kept))])
    variance = squares / max(count - 1, 1.0)
    if variance < _EQUAL:
        return [np.zeros(len(values)) for values in advantages]
    return [(values - mean) / np.sqrt(variance + EPS) for values in advantages]
