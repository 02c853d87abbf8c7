"""The weight of each token in the loss of a step: `algorithm.loss_agg`.

Gradients are summed as groups arrive, over micro-batches and ranks, and divided once, at the end of the step, by the sum of
`weight` over all of them. So the loss is a mean over the step, however its rows were split.
"""

from typing import NamedTuple

from torch import Tensor


class TokenWeights(NamedTuple):
    """The loss of a step is sum(tokens * per-token loss) / sum(weight), both over all its micro-batches."""

    tokens: Tensor
    """[R], 0 for tokens without loss."""
    weight: Tensor
    """Scalar: this micro-batch's part of the divisor."""


def token_mean(mask: Tensor) -> TokenWeights:
    """Mean over all tokens with loss of the step (DAPO, arXiv 2503.14476, formula 12): mask [R]."""
    return TokenWeights(mask, mask.sum())
