"""The rows that decode together, as arrays. A step changes them in place."""

from collections.abc import Sequence as Many
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .sampling import ROW, SamplingBatch
from .to_device import to_device, to_device_together

if TYPE_CHECKING:
    from ...trainer.policy.model import Policy
    from .page_pool import PagePool
    from .sequence import Sequence


class RowChange(NamedTuple):
    """How the last `update` changed the rows; all tensors are on the device."""

    num_before: int
    """Rows before it."""
    width: int
    """Pages of the longest of them."""
    num_kept: int
    """Rows that stay; they are the first ones now, in the same order."""
    kept: Tensor | None
    """int64 [num_kept]: their places before; None if these are the same."""
    numbers: Tensor
    """int64 [3, B]: position, number of drawn tokens and key of each row."""
    has_moved: bool
    """Whether pages of rows that stay have changed places."""
    table: Tensor
    """int32 [B - num_kept, widest]: the pages of the rows that entered."""


class DecodeBatch:
    """Running sequences by row: newest token, its position, its slot in the cache, and the table of pages.

    Rows change when sequences enter or leave (`update`), gain pages (`extend`) and advance by one token per step (`advance`). The
    newest tokens of rows that stay are known to the device alone, since the step that draws them may be under way. Numpy arrays
    are on the host, tensors on the device; all int64.
    """

    def __init__(self, pool: "PagePool", policy: "Policy", max_running: int) -> None:
        self.vocab_size = policy.vocab_size
        self.device = policy.device
        self.pool = pool
        self.max_pages = pool.pages_for(policy.context)
        self.sequences: list[Sequence] = []
        self.generation = 0
        """Counts changes of rows or pages."""
        self.num_updates = 0
        """Counts changes of rows."""
        self.grown: list[tuple[int, int, int]] = []
        """Row, column and page of each entry that this step added to the table in rows that stay."""
        self.change: RowChange | None = None
        self._entries: list[int] = []
        """`Sequence.num_entries` of the rows: a sequence that left its row and entered it again since is another row."""
        self._rows = np.zeros(max_running, ROW)
        self._numbers = np.zeros((4, max_running), dtype=np.int64)
        self._positions, self._num_drawn, self._keys, self._num_pages = self._numbers
        self._table = np.zeros((max_running, self.max_pages), dtype=np.int64)
        self._states = np.zeros((max_running, 2), dtype=np.int64)
        self.is_shared = np.zeros((0, self.max_pages), dtype=bool)
        """Which pages of the table several rows share, where attention reads them in ranges."""
        self.tokens = torch.zeros(0, dtype=torch.long, device=self.device)
        self.num_drawn = torch.zeros(0, dtype=torch.long, device=self.device)
        self.sampling = SamplingBatch(self.num_drawn, None, self.num_drawn.bool())

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def positions(self) -> np.ndarray:
        """[B]: of the newest tokens."""
        return self._positions[: len(self)]

    @property
    def num_pages(self) -> np.ndarray:
        """[B]"""
        return self._num_pages[: len(self)]

    @property
    def table(self) -> np.ndarray:
        """[B, max_pages]: the pages of each row, and 0 behind them."""
        return self._table[: len(self)]

    @property
    def states(self) -> np.ndarray:
        """[B, 2]: the places of each row's recurrent states (`Sequence.states`)."""
        return self._states[: len(self)]

    def update(self, sequences: "list[Sequence]", *, has_moved: bool = False) -> None:
        """Make these sequences the rows, in this order: those that were rows before, then those that enter.

        has_moved: pages may have changed places.
        """
        self.generation += 1
        self.num_updates += 1
        before = len(self)
        width = int(self.num_pages.max(initial=0))
        kept, gaps = self._rows_that_stay(sequences)
        self.sequences = list(sequences)
        self._entries = [s.num_entries for s in sequences]
        self._close_gaps(gaps, before, width)
        entering = sequences[len(kept) :]
        for row, sequence in enumerate(entering, len(kept)):
            self._fill(row, sequence)
        self.grown = self._added_pages(len(kept))
        if has_moved:
            for row, sequence in enumerate(sequences):
                self._table[row, : len(sequence.pages)] = sequence.pages
        if self.pool.in_ranges:
            self.is_shared = self.pool.is_shared[self.table]
        self._send(kept, (before, width), entering, has_moved=has_moved)

    def extend(self) -> None:
        """Add the pages that the scheduler gave to the running sequences since."""
        self.grown = self._added_pages(len(self))
        self.generation += bool(self.grown)

    def advance(self, tokens: Tensor) -> None:
        """Advance every row by one position; `tokens` [B] are the rows' newest tokens."""
        self.tokens = tokens
        self._positions[: len(self)] += 1
        self._num_drawn[: len(self)] += 1
        self.num_drawn += 1

    def slots(self) -> Tensor:
        """Slots for the keys and values of this step's tokens, int64 [B]."""
        size = self.pool.page_size
        columns = np.minimum(self.positions // size, self.max_pages - 1)
        tails = self.table[np.arange(len(self)), columns]
        return to_device(tails * size + self.positions % size, self.device)

    def table_on_device(self) -> Tensor:
        """int32 [B, widest]: the pages of all rows."""
        width = int(self.num_pages.max(initial=0))
        return to_device(self.table[:, :width].astype(np.int32), self.device)

    def _rows_that_stay(self, sequences: "list[Sequence]") -> tuple[list[int], list[int]]:
        """The rows of sequences that were rows all the time since the last `update`, and whose order is the same; and the other rows."""
        kept: list[int] = []
        gaps: list[int] = []
        following = iter(sequences)
        wanted = next(following, None)
        entries = self._entries
        for row, sequence in enumerate(self.sequences):
            if sequence is wanted and sequence.num_entries == entries[row]:
                kept.append(row)
                wanted = next(following, None)
            else:
                gaps.append(row)
        return kept, gaps

    def _close_gaps(self, gaps: list[int], before: int, width: int) -> None:
        """Move the rows that stay to the front; rows behind them have no pages."""
        for number, (gap, end) in enumerate(pairwise([*gaps, before])):
            place = gap - number  # so many gaps are before the rows between this gap and the next
            for values in (self._rows, self._numbers.T, self._states, self._table[:, :width]):
                values[place : place + end - gap - 1] = values[gap + 1 : end]
        self._table[before - len(gaps) : before, :width] = 0

    def _fill(self, row: int, sequence: "Sequence") -> None:
        """Set the row of a sequence that enters."""
        assert sequence.num_cached == sequence.num_tokens - 1, "a sequence enters when all its tokens are read"
        self._positions[row] = sequence.num_cached
        self._num_drawn[row] = len(sequence.token_ids)
        self._num_pages[row] = len(sequence.pages)
        self._states[row] = sequence.states
        self._table[row, : len(sequence.pages)] = sequence.pages
        self._keys[row] = sequence.key
        self._rows[row] = sequence.params.row

    def _added_pages(self, count: int) -> list[tuple[int, int, int]]:
        """Row, column and page of the entries that the first `count` rows lack for their newest token; they are in the table now."""
        is_full = self._num_pages[:count] * self.pool.page_size <= self._positions[:count]
        full = [(row, int(self._num_pages[row]), self.sequences[row].pages) for row in np.flatnonzero(is_full).tolist()]
        added = [(row, num_pages, pages[-1]) for row, num_pages, pages in full if len(pages) > num_pages]
        for row, column, page in added:
            self._table[row, column] = page
            self._num_pages[row] += 1
        return added

    def _send(self, kept: list[int], before: tuple[int, int], entering: "Many[Sequence]", *, has_moved: bool) -> None:
        """Bring the device's tensors up to date, with one copy. before: the number of rows, and the pages of the longest."""
        count = len(self)
        num_kept = len(kept)
        has_gaps = num_kept > 0 and kept[-1] >= num_kept
        width = int(self._num_pages[num_kept:count].max(initial=0))
        newest = [s.token_ids[-1] if s.token_ids else s.prompt_ids[-1] for s in entering]
        rows = self._rows[:count]
        sent = to_device_together(
            {
                "kept": np.array(kept if has_gaps else [], dtype=np.int64),
                "newest": np.array(newest, dtype=np.int64),
                "numbers": self._numbers[:3, :count].copy(),
                "table": self._table[num_kept:count, :width].astype(np.int32),
                **SamplingBatch.columns(rows),
            },
            self.device,
        )
        places = sent["kept"] if has_gaps else None
        self.change = RowChange(*before, num_kept, places, sent["numbers"], has_moved, sent["table"])
        tokens = self.tokens.index_select(0, sent["kept"]) if has_gaps else self.tokens[:num_kept]
        self.tokens = torch.cat((tokens, sent["newest"])) if newest else tokens
        self.num_drawn = sent["numbers"][1].clone()
        seen = self.sampling.seen
        if seen is not None:
            seen = seen.index_select(0, sent["kept"]) if has_gaps else seen[:num_kept]
        self.sampling = SamplingBatch.of(rows, sent["numbers"][2], sent)
        self.sampling.record_tokens(seen, [s.prompt_ids + s.token_ids for s in entering], self.vocab_size)
