"""The tokens of prompt and response of each row, for repetition penalties on a GPU: one bit per token of the vocabulary."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..sequence import Sequence as Trajectory

_WORD = 32
"""Bits of a number."""


class SeenTokens:
    """Bits at a fixed address, to which the kernels add each drawn token.

    A sequence that stays in the batch keeps its bits in whichever row it is. One that enters sends its own.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.bits = torch.zeros(max_rows, -(-vocab_size // _WORD), dtype=torch.int32, device=device)

    def columns(
        self, before: "Sequence[Trajectory]", now: "Sequence[Trajectory]", entered: "Collection[Trajectory]"
    ) -> dict[str, np.ndarray]:
        """For `update`: the former row of each sequence that stays, and the rows and bits of those that enter, with a penalty."""
        if all(s.params.repetition_penalty == 1 for s in now):
            return {}
        rows_before, ids_entered = {id(s): row for row, s in enumerate(before)}, {id(s) for s in entered}
        # A row without a penalty may have the bits of any other.
        sources = np.zeros(len(now), dtype=np.int64)
        new: list[tuple[int, Trajectory]] = []
        for row, sequence in enumerate(now):
            if sequence.params.repetition_penalty == 1:
                continue
            if id(sequence) in ids_entered:
                new.append((row, sequence))
            else:
                sources[row] = rows_before[id(sequence)]
        flags = np.zeros((len(new), self.bits.shape[1] * _WORD), dtype=bool)
        for own, (_, sequence) in zip(flags, new, strict=True):
            own[sequence.prompt_ids + sequence.token_ids] = True
        return {
            "seen_sources": sources,
            "seen_rows": np.array([row for row, _ in new], dtype=np.int64),
            "seen_new": np.packbits(flags, axis=1, bitorder="little").view(np.int32),
        }

    def update(self, columns: Mapping[str, Tensor]) -> None:
        """Give each row its bits: first to those that stay, by a copy since rows change places, then to the new ones."""
        if "seen_new" in columns:
            sources = columns["seen_sources"]
            self.bits[: len(sources)] = self.bits.index_select(0, sources)
            self.bits.index_copy_(0, columns["seen_rows"], columns["seen_new"])
