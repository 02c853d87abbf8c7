"""Sums over the responses of a packed batch, and figures of responses spread over their tokens.

Responses are one after the other: `lengths` [n] of them make R response tokens. The sums do not depend on the order in which
a device adds, so that a replay repeats them.
"""

import torch
from torch import Tensor


def sequence_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum over the tokens of each response: values [R], lengths [n] int64 -> [n]; 0 for an empty response."""
    return torch.segment_reduce(values, "sum", lengths=lengths, initial=0)


def spread(values: Tensor, lengths: Tensor) -> Tensor:
    """Each response's figure for each of its tokens: values [n], lengths [n] int64 -> [R]."""
    return values.repeat_interleave(lengths)
