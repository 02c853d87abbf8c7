"""Rotary embeddings by rows of one table: a row is a position, or in a LongRoPE policy a position and a set of frequencies.

LongRoPE (arXiv 2402.13753; Phi-3 128k, Phi-4-mini) has two sets of frequencies: a forward pass over at most `switch` tokens
uses the short ones for all of them, a longer one the long ones. So a token is drawn from a policy that depends on the number of
tokens before it, and at token `switch` + 1 transformers' `generate` computes its cache again. Generator and trainer do the same:
row p < switch is position p with the short frequencies, row switch + p is position p with the long ones.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class RopeRows:
    """Which row each token takes. Without a switch, its position."""

    def __init__(self, config: Any) -> None:
        parameters = getattr(config, "rope_parameters", None) or {}
        is_long = parameters.get("rope_type") == "longrope"
        self.switch: int | None = parameters["original_max_position_embeddings"] if is_long else None
        self.count: int = config.max_position_embeddings + (self.switch or 0)

    def is_long(self, length: int) -> bool:
        """Whether a forward pass over `length` tokens takes the long frequencies."""
        return self.switch is not None and length > self.switch

    def of_chunk(self, start: int, stop: int, length: int) -> range:
        """Rows of the positions [start, stop) in a forward pass over `length` tokens."""
        offset = self.switch if self.switch is not None and self.is_long(length) else 0
        return range(start + offset, stop + offset)

    def of_newest(self, positions: Tensor) -> Tensor:
        """Rows of the last tokens of sequences, at these positions."""
        return positions if self.switch is None else positions + self.switch * (positions >= self.switch)

    def must_recompute(self, num_cached: int, position: int) -> bool:
        """Whether a cache of the first tokens of a sequence has other frequencies than its token at `position` needs."""
        return self.switch is not None and num_cached <= self.switch <= position

    def passes(self, lengths: Sequence[int]) -> "Passes | None":
        """The forward passes that packed sequences need; None if one over each sequence is enough.

        A sequence beyond the switch takes two: its first `switch` tokens were drawn with the short frequencies.
        """
        switch = self.switch
        if switch is None or max(lengths) <= switch:
            return None
        tokens = []
        sizes = []
        results = []
        start = 0
        for length in lengths:
            for size, first in ((switch, 0), (length, switch)) if length > switch else ((length, 0),):
                results += range(sum(sizes) + first, sum(sizes) + size)
                tokens += range(start, start + size)
                sizes.append(size)
            start += length
        return Passes(torch.tensor(tokens), sizes, torch.tensor(results))


class Passes(NamedTuple):
    """Forward passes over packed sequences: the indices of their tokens, their lengths, and which of their results count."""

    tokens: Tensor
    lengths: list[int]
    results: Tensor


class LongRope(nn.Module):
    """Rotary embedding of a LongRoPE policy by rows, in place of transformers' own, which has one length for a whole batch."""

    def __init__(self, config: Any, switch: int) -> None:
        super().__init__()
        self._switch = switch
        compute = ROPE_INIT_FUNCTIONS["longrope"]
        short, scale = compute(config)
        long, _ = compute(config, seq_len=switch + 1)
        self._scale = scale
        self.register_buffer("_frequencies", torch.stack((short, long)), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, T, rotary dim] of the rows `position_ids` [B, T], in the type of `x`."""
        rows = position_ids
        is_long = (rows >= self._switch).long()
        frequencies = self.get_buffer("_frequencies").to(x.device)[is_long]
        angles = (rows - self._switch * is_long)[..., None].float() * frequencies
        angles = torch.cat((angles, angles), -1)
        return (angles.cos() * self._scale).to(x.dtype), (angles.sin() * self._scale).to(x.dtype)
