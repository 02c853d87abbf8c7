"""Captured CUDA graphs of the whole decode step: attention, head, sampling, and the move to the next position.

All inputs of a step are tensors at fixed addresses, and a step prepares them for the next one: between two changes of rows
a step is one replay, with a copy of added pages from the host, if there are any. Filters and penalties are operators over
all logits, which follow the replay. Weights are overwritten in place, so graphs outlive a version.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .sampling import Sample, SamplingBatch, sample
from .to_device import to_device

if TYPE_CHECKING:
    from ...trainer.policy.attention import Attention
    from ...trainer.policy.decoder import Head
    from .attention.cuda import TableAttention
    from .batch import DecodeBatch

_NARROWEST = 1024
"""Tokens of a row in the narrowest graph."""
_WIDER = 4
"""Each next graph is this many times wider."""


class DecodeGraphs:
    """Decode steps by number of rows and pages of the longest, captured when first needed. Unused rows decode token 0 into page 0."""

    def __init__(
        self,
        forward: "Callable[[Tensor, Tensor, Attention], Tensor]",
        head: "Head",
        attention: "TableAttention",
        logits: Tensor,
        max_pages: int,
        max_running: int,
        sample: "Callable[[Tensor, SamplingBatch, Tensor], Sample]" = sample,
    ) -> None:
        self._forward = forward
        self._head = head
        self._attention = attention
        self._sample = sample
        self._logits = logits
        device = logits.device
        self._sizes = [*(size for size in (1, 2, 4) if size < max_running), *range(8, max_running, 8), max_running]
        """Numbers of rows with a graph of their own."""
        page_size = attention.cache.page_size
        self._widths = [*_powers(_NARROWEST // page_size or 1, max_pages), max_pages]
        """Pages of the longest row, likewise: a launch has a program for each part of the widest row's pages."""
        self._graphs: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        """By rows, pages, and whether the graph draws, in the plain way."""
        self._tokens, self._positions, self._num_drawn, self._keys = (
            torch.zeros(max_running, dtype=torch.long, device=device) for _ in range(4)
        )
        self._table = torch.zeros(max_running, max_pages, dtype=torch.int32, device=device)
        self._scale = torch.ones(max_running, 1, device=device)
        self._is_greedy = torch.zeros(max_running, dtype=torch.bool, device=device)
        self._logprobs = torch.zeros(max_running, device=device)
        self._num_refills = -1
        self._pool: Any = None

    def decode(self, batch: "DecodeBatch") -> Sample:
        """Draw the next token of every row."""
        rows = len(batch)
        size = next(size for size in self._sizes if size >= rows)
        if self._num_refills != batch.num_refills:
            self._num_refills = batch.num_refills
            self._load(batch, size)
        elif batch.grown:
            places = to_device(np.array(batch.grown, dtype=np.int64), batch.device)
            self._table[places[:, 0], places[:, 1]] = places[:, 2].int()
        num_pages = int(batch.num_pages.max())
        width = next(width for width in self._widths if width >= num_pages)
        is_plain = batch.sampling.filters is None
        key = size, width, is_plain
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        self._graphs[key].replay()
        if not is_plain:
            drawn = self._sample(self._logits[:rows], batch.sampling, batch.num_drawn)
            self._tokens[:rows] = drawn.tokens
            return drawn
        return Sample(self._tokens[:rows].clone(), self._logprobs[:rows].clone())

    def forget(self) -> None:
        """Drop the graphs, because the weights have other addresses now."""
        self._graphs.clear()

    def _load(self, batch: "DecodeBatch", size: int) -> None:
        rows = len(batch)
        for tensor in (self._tokens, self._positions, self._num_drawn, self._table):
            tensor[rows:size].zero_()
        positions, table = batch.at_refill
        self._tokens[:rows] = batch.tokens
        self._positions[:rows] = positions
        self._num_drawn[:rows] = batch.num_drawn
        self._keys[:rows] = batch.sampling.keys
        self._is_greedy[:rows] = batch.sampling.is_greedy
        self._scale[:rows] = 1.0 if batch.sampling.scale is None else batch.sampling.scale
        self._table[:rows, : table.shape[1]] = table

    def _step(self, size: int, width: int, draws: bool) -> None:
        positions = self._positions[:size]
        self._attention.use(self._table[:size, :width], (positions + 1).int())
        hidden = self._forward(self._tokens[:size], positions, self._attention)
        logits = self._head(hidden, out=self._logits)
        if draws:
            rows = SamplingBatch.fixed(self._keys[:size], self._scale[:size], self._is_greedy[:size])
            drawn = self._sample(logits, rows, self._num_drawn[:size])
            self._tokens[:size].copy_(drawn.tokens)
            self._logprobs[:size].copy_(drawn.logprobs)
        positions.add_(1)
        self._num_drawn[:size].add_(1)

    def _capture(self, size: int, width: int, draws: bool) -> torch.cuda.CUDAGraph:
        state = (self._tokens, self._positions, self._num_drawn)
        before = [tensor.clone() for tensor in state]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # The first run compiles and selects kernels, which must not be captured.
            self._step(size, width, draws)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # One memory pool for all: only one graph runs at a time, and its results are copied out.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # By default an allocation in another thread, such as a transfer of weights, would spoil the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(size, width, draws)
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        return graph


def _powers(first: int, end: int) -> list[int]:
    """`first`, and each time `_WIDER` times as many, below `end`."""
    found: list[int] = []
    while first < end:
        found.append(first)
        first *= _WIDER
    return found
