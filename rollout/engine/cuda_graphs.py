"""Captured CUDA graphs of the whole decode step: attention, head, sampling, and the move to the next position.

All inputs of a step are tensors at fixed addresses, and a step prepares them for the next one: between two changes of rows
a step is one replay, with a copy of added pages from the host, if there are any. Weights are overwritten in place, so
graphs outlive a version.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .sampling import Sample, SamplingBatch, sample

if TYPE_CHECKING:
    from ...trainer.policy.attention import Attention
    from ...trainer.policy.decoder import Head
    from .attention_cuda import TableAttention
    from .batch import DecodeBatch


class DecodeGraphs:
    """Decode steps by number of rows, captured when first needed. Unused rows decode token 0 into page 0."""

    def __init__(
        self,
        forward: "Callable[[Tensor, Tensor, Attention], Tensor]",
        head: "Head",
        attention: "TableAttention",
        space: tuple[Tensor, Tensor],
        max_pages: int,
        max_running: int,
    ) -> None:
        self._forward, self._head, self._attention = forward, head, attention
        self._logits, self._scratch = space
        device = self._logits.device
        self._sizes = [*(size for size in (1, 2, 4) if size < max_running), *range(8, max_running, 8), max_running]
        """Numbers of rows with a graph of their own."""
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._tokens, self._positions, self._num_drawn, self._keys = (
            torch.zeros(max_running, dtype=torch.long, device=device) for _ in range(4)
        )
        self._table = torch.zeros(max_running, max_pages, dtype=torch.int32, device=device)
        self._scale = torch.ones(max_running, 1, device=device)
        self._is_greedy = torch.zeros(max_running, dtype=torch.bool, device=device)
        self._logprobs = torch.zeros(max_running, device=device)
        self._num_refills = -1
        self._pool: Any = None

    @staticmethod
    def can_run(batch: "DecodeBatch") -> bool:
        """Whether all rows sample in the plain way that is captured."""
        return batch.sampling.is_plain and batch.sampling.seen is None

    def decode(self, batch: "DecodeBatch") -> Sample:
        rows = len(batch)
        size = next(size for size in self._sizes if size >= rows)
        if self._num_refills != batch.num_refills:
            self._num_refills = batch.num_refills
            self._load(batch, size)
        elif batch.grown:
            # Non-blocking: a plain copy to the device would wait for the step under way.
            places = torch.tensor(batch.grown).to(batch.device, non_blocking=True)
            self._table[places[:, 0], places[:, 1]] = places[:, 2].int()
        if size not in self._graphs:
            self._capture(size)
        self._graphs[size].replay()
        return Sample(self._tokens[:rows].clone(), self._logprobs[:rows].clone())

    def forget(self) -> None:
        """Drop the graphs, because the weights have other addresses now."""
        self._graphs.clear()

    def _load(self, batch: "DecodeBatch", size: int) -> None:
        rows = len(batch)
        for tensor in (self._tokens, self._positions, self._num_drawn, self._table):
            tensor[rows:size].zero_()
        self._tokens[:rows] = batch.tokens
        self._positions[:rows] = torch.from_numpy(batch.positions).to(batch.device)
        self._num_drawn[:rows] = batch.num_drawn
        self._keys[:rows] = batch.sampling.keys
        self._is_greedy[:rows] = batch.sampling.is_greedy
        self._scale[:rows] = 1.0 if batch.sampling.scale is None else batch.sampling.scale
        self._table[:rows] = torch.from_numpy(batch.table).to(batch.device, torch.int32)

    def _step(self, size: int) -> None:
        attention, positions = self._attention, self._positions[:size]
        page = attention.cache.page_size
        columns = (positions // page).clamp_(max=self._table.shape[1] - 1)
        pages = self._table[:size].gather(1, columns[:, None])[:, 0].long()
        attention.table, attention.lengths = self._table[:size], (positions + 1).int()
        attention.cache_rows = attention.cache.cache_rows(pages * page + positions % page)
        hidden = self._forward(self._tokens[:size], positions, attention)
        rows = SamplingBatch.fixed(self._keys[:size], self._scale[:size], self._is_greedy[:size])
        drawn = sample(self._head(hidden, out=self._logits), rows, self._num_drawn[:size], self._scratch[:size])
        self._tokens[:size].copy_(drawn.tokens)
        self._logprobs[:size].copy_(drawn.logprobs)
        positions.add_(1)
        self._num_drawn[:size].add_(1)

    def _capture(self, size: int) -> None:
        state = (self._tokens, self._positions, self._num_drawn)
        before = [tensor.clone() for tensor in state]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # The first run compiles and selects kernels, which must not be captured.
            self._step(size)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # One memory pool for all: only one graph runs at a time, and its results are copied out.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(size)
        self._graphs[size] = graph
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
