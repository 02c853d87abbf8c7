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
        """For `update`: the bits of sequences that entered with a penalty, and where each row's bits come from."""
        if all(s.params.repetition_penalty == 1 for s in now):
            return {}
        max_rows, num_words = self.bits.shape
        sources = {id(s): row for row, s in enumerate(before)}
        new = [s for s in entered if s.params.repetition_penalty != 1]
        sources |= {id(s): max_rows + place for place, s in enumerate(new)}
        flags = np.zeros((len(new), num_words * _WORD), dtype=bool)
        for own, sequence in zip(flags, new, strict=True):
            own[sequence.prompt_ids + sequence.token_ids] = True
        # A row without a penalty may have the bits of any other.
        return {
            "seen_sources": np.array(
                [0 if s.params.repetition_penalty == 1 else sources[id(s)] for s in now], dtype=np.int64
            ),
            "seen_new": np.packbits(flags, axis=1, bitorder="little").view(np.int32),
        }

    def update(self, columns: Mapping[str, Tensor]) -> None:
        """Give each row its bits."""
        if "seen_new" in columns:
            sources = columns["seen_sources"]
            self.bits[: len(sources)] = torch.cat((self.bits, columns["seen_new"])).index_select(0, sources)
