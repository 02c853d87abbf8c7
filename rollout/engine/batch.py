"""The rows that decode together, as arrays: what changes per step is small and is changed in place."""

import numpy as np
import torch
from torch import Tensor

from .kv_cache import PagePool
from .sampling import SamplingBatch
from .sequence import Sequence


class DecodeBatch:
    """Running sequences by row: newest token, its position, its slot in the cache, and the table of pages.

    `rows` is rebuilt when sequences enter or leave (`refill`), grows a page now and then (`extend`) and moves on one
    token per step (`advance`). Numpy arrays lie on the host, tensors on the device; all int64.
    """

    def __init__(self, pool: PagePool, max_pages: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.pool = pool
        self.max_pages = max_pages
        self.sequences: list[Sequence] = []
        self.generation = 0
        """Counts the changes of rows and pages."""
        self.num_refills = 0
        """Counts the changes of rows."""
        self.grown: list[tuple[int, int, int]] = []
        """Row, column and page of what this step's `extend` added to the table."""

    def __len__(self) -> int:
        return len(self.sequences)

    def refill(self, sequences: list[Sequence]) -> None:
        """Take these sequences as the rows, in this order."""
        self.generation += 1
        self.num_refills += 1
        self.grown = []
        self.sequences = list(sequences)
        count = len(sequences)
        self.positions = np.array([s.num_cached for s in sequences], dtype=np.int64)
        self.num_pages = np.array([len(s.pages) for s in sequences], dtype=np.int64)
        self.num_shared = np.array([s.num_shared for s in sequences], dtype=np.int64)
        self.table = np.zeros((count, self.max_pages), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            self.table[row, : len(sequence.pages)] = sequence.pages
        newest = [s.token_ids[-1] if s.token_ids else s.prompt_ids[-1] for s in sequences]
        self.tokens = torch.from_numpy(np.array(newest, dtype=np.int64)).to(self.device)
        drawn = np.array([len(s.token_ids) for s in sequences], dtype=np.int64)
        self.drawn = torch.from_numpy(drawn).to(self.device)
        self.sampling = SamplingBatch([s.params for s in sequences], [s.key for s in sequences], self.device)
        self.sampling.record_tokens((s.prompt_ids + s.token_ids for s in sequences), self.vocab_size)

    def extend(self) -> None:
        """Take over pages that the scheduler gave to the running sequences since."""
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
        """Every row has cached its newest token and drawn `tokens` [B]."""
        self.tokens = tokens
        self.positions += 1
        self.drawn += 1

    def slots(self) -> Tensor:
        """Where the keys and values of this step's tokens go, int64 [B]."""
        size = self.pool.page_size
        columns = np.minimum(self.positions // size, self.max_pages - 1)
        tails = self.table[np.arange(len(self.positions)), columns]
        return torch.from_numpy(tails * size + self.positions % size).to(self.device, non_blocking=True)
