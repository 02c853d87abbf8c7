"""Figures of the responses of a packed batch: sums and means over their tokens.

Responses are one after the other: `lengths` [n] int64 of them make R tokens. A device adds in a fixed order, so that a replay
repeats the sums.
"""

import torch
from torch import Tensor


def sequence_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum over the tokens of each response: values [R] -> [n]; 0 for an empty response."""
    # `unsafe`: lengths are not checked, for which the host would wait.
    return torch.segment_reduce(values, "sum", lengths=lengths, initial=0, unsafe=True)


def sequence_means(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Mean over the tokens with loss of each response: values, mask [R] -> [n]; 0 for a response without loss."""
    return sequence_sums(values * mask, lengths) / sequence_sums(mask, lengths).clamp(min=1)


def spread(values: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """Each response's figure for each of its tokens: values [n] -> [R], R = `num_tokens`, which a GPU need not tell the host then."""
    return values.repeat_interleave(lengths, output_size=num_tokens)
