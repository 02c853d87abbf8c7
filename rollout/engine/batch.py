"""The rows that decode together, as arrays. The small changes of a step are made in place."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .sampling import SamplingBatch, sampling_columns
from .to_device import to_device, to_device_together

if TYPE_CHECKING:
    from ...trainer.policy.model import Policy
    from .page_pool import PagePool
    from .sequence import Sequence


class DecodeBatch:
    """Running sequences by row: newest token, its position, its slot in the cache, and the table of pages.

    The rows are rebuilt when sequences enter or leave (`refill`), gain pages (`extend`) and advance by one token per step
    (`advance`). `states` are the places of their recurrent states (`Sequence.states`). Numpy arrays are on the host, tensors on the device; all int64.
    """

    def __init__(self, pool: "PagePool", policy: "Policy") -> None:
        self.vocab_size = policy.vocab_size
        self.device = policy.device
        self.pool = pool
        self.max_pages = pool.pages_for(policy.context)
        self.sequences: list[Sequence] = []
        self.generation = 0
        """Counts changes of rows or pages."""
        self.num_refills = 0
        """Counts changes of rows."""
        self.grown: list[tuple[int, int, int]] = []
        """Row, column and page of each entry that this step's `extend` added to the table."""
        self.at_refill: tuple[Tensor, Tensor] = (torch.zeros(0), torch.zeros(0))
        """The positions and the table (int32, as wide as the longest row) with which the rows began, on the device."""

    def __len__(self) -> int:
        return len(self.sequences)

    def refill(self, sequences: "list[Sequence]") -> None:
        """Make these sequences the rows, in this order."""
        self.generation += 1
        self.num_refills += 1
        self.grown = []
        self.sequences = list(sequences)
        count = len(sequences)
        self.positions = np.array([s.num_cached for s in sequences], dtype=np.int64)
        self.num_pages = np.array([len(s.pages) for s in sequences], dtype=np.int64)
        self.table = np.zeros((count, self.max_pages), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            self.table[row, : len(sequence.pages)] = sequence.pages
        self.is_shared = self.pool.is_shared[self.table]
        self.states = np.array([s.states for s in sequences], dtype=np.int64).reshape(count, 2)
        newest = [s.token_ids[-1] if s.token_ids else s.prompt_ids[-1] for s in sequences]
        params = [s.params for s in sequences]
        width = int(self.num_pages.max(initial=0))
        columns = to_device_together(
            {
                "tokens": np.array(newest, dtype=np.int64),
                "num_drawn": np.array([len(s.token_ids) for s in sequences], dtype=np.int64),
                "positions": self.positions.copy(),
                "table": self.table[:, :width].astype(np.int32),
                **sampling_columns(params, [s.key for s in sequences]),
            },
            self.device,
        )
        self.tokens = columns["tokens"]
        self.num_drawn = columns["num_drawn"]
        self.at_refill = columns["positions"], columns["table"]
        self.sampling = SamplingBatch(params, columns)
        self.sampling.record_tokens((s.prompt_ids + s.token_ids for s in sequences), self.vocab_size)

    def extend(self) -> None:
        """Add the pages that the scheduler gave to the running sequences since."""
        self.grown = [
            (row, int(self.num_pages[row]), sequence.pages[-1])
            for row, sequence in enumerate(self.sequences)
            if len(sequence.pages) != self.num_pages[row]
        ]
        for row, column, page in self.grown:
            self.table[row, column] = page
            self.num_pages[row] += 1
        self.generation += bool(self.grown)

    def advance(self, tokens: Tensor) -> None:
        """Advance every row by one position; `tokens` [B] are the rows' newest tokens."""
        self.tokens = tokens
        self.positions += 1
        self.num_drawn += 1

    def slots(self) -> Tensor:
        """Slots for the keys and values of this step's tokens, int64 [B]."""
        size = self.pool.page_size
        columns = np.minimum(self.positions // size, self.max_pages - 1)
        tails = self.table[np.arange(len(self.positions)), columns]
        return to_device(tails * size + self.positions % size, self.device)
