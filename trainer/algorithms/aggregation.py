"""The weight of each token in the loss of a step: `algorithm.loss_agg`.

Gradients are summed as groups arrive, over micro-batches and ranks, and divided once, at the end of the step, by the sum of
`weight` over all of them. So the loss is a mean over the step, however its rows were split.
"""

from typing import NamedTuple

from torch import Tensor

from .sequences import sequence_sums, spread


class TokenWeights(NamedTuple):
    """The loss of a step is sum(tokens * loss of each token) / sum(weight), both over all its micro-batches."""

    tokens: Tensor
    """[R], 0 for tokens without loss."""
    weight: Tensor
    """Scalar: this micro-batch's part of the divisor."""


def token_weights(loss_agg: str, mask: Tensor, lengths: Tensor, max_new_tokens: int) -> TokenWeights:
    """Weights for mask [R] and lengths [n] of responses; a response without a token with loss does not count (as in verl).

    token-mean: mean over the tokens of the step (DAPO, arXiv 2503.14476, formula 12; TRL's `dapo`, and its `bnpo`, which takes
    the mean over a micro-batch). seq-mean-token-mean: mean over responses of the mean over their tokens (GRPO,
    arXiv 2402.03300, formula 3). seq-mean-token-sum: mean over responses of the sum over their tokens.
    seq-mean-token-sum-norm: that, divided by the constant `max_new_tokens` (Dr. GRPO, arXiv 2503.20783, section 3.2).
    """
    if loss_agg == "token-mean":
        return TokenWeights(mask, mask.sum())
    counts = sequence_sums(mask, lengths)
    tokens = {
        "seq-mean-token-mean": lambda: mask / spread(counts.clamp(min=1), lengths, len(mask)),
        "seq-mean-token-sum": lambda: mask,
        "seq-mean-token-sum-norm": lambda: mask / max_new_tokens,
    }[loss_agg]()
    return TokenWeights(tokens, (counts > 0).to(mask.dtype).sum())
