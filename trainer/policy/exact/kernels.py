"""The operators of exact mode on a GPU, by batch-invariant Triton kernels.

Generator and trainer launch the same compiled kernels: all that Triton compiles by (types, tile sizes, warps, alignment) follows from
the policy alone.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import AttentionSpec
from ..kernels.exact_attention import QueryTiles, exact_paged_attention, tokens_per_tile
from ..kernels.exact_linear import exact_linear
from ..kernels.exact_rows import exact_log_softmax, exact_rms_norm
from ..kernels.gate import silu_times
from ..kernels.merge import SPLIT
from .gradient import with_gradient
from .operators import Run

_PARTS_BYTES = 256 << 20
"""Most memory that the results of splits take at one time."""


class KernelOperators:
    """See `ExactOperators`."""

    rows = 1
    has_tables = True

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return exact_linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return with_gradient(
            lambda x, weight: exact_rms_norm(x, weight, eps),
            lambda x, weight: F.rms_norm(x, weight.shape, weight, eps),
            x,
            weight,
        )

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return with_gradient(silu_times, lambda gate, up: F.silu(gate) * up, gate, up)

    def logits(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        shape = (len(hidden), len(weight))
        out = hidden.new_empty(shape, dtype=torch.float32) if out is None else out[: len(hidden)]
        return exact_linear(
            hidden.to(dtype), weight.to(dtype), None, out
        )  # without a copy on a GPU, which has them in it

    def log_softmax(self, logits: Tensor) -> Tensor:
        return exact_log_softmax(logits)

    def over_pages(self, runs: Sequence[Run], device: torch.device | str) -> "KernelAttention":
        return KernelAttention(runs, device)


class KernelAttention:
    """See `PagesAttention`; as many tiles of queries at a time as the results of their splits have room."""

    def __init__(self, runs: Sequence[Run], device: torch.device | str) -> None:
        self._runs = runs
        self._device = device
        width = max(len(run.pages) for run in runs)
        table = np.zeros((len(runs), width), dtype=np.int32)
        for row, run in zip(table, runs, strict=True):
            row[: len(run.pages)] = run.pages
        self._table = torch.from_numpy(table).to(device)
        positions = np.concatenate([np.arange(run.start, run.stop, dtype=np.int32) for run in runs])
        self._lengths = torch.from_numpy(positions + 1).to(device)
        self._launches: list[tuple[slice, QueryTiles, int]] | None = None

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        if self._launches is None:
            row_bytes = 4 * query.shape[1] * query.shape[2]
            tokens = tokens_per_tile(query.shape[1] // keys.shape[1], query.dtype)
            self._launches = list(self._planned(tokens, row_bytes))
        parts = [
            exact_paged_attention(query[rows], keys, values, tiles, num_keys, spec)
            for rows, tiles, num_keys in self._launches
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _planned(self, tokens: int, row_bytes: int) -> Iterator[tuple[slice, QueryTiles, int]]:
        """Launches: their queries, the tiles of those, and the keys of the longest sequence."""
        tiles: list[tuple[int, int, int, int]] = []
        begin = end = longest = 0
        for sequence, run in enumerate(self._runs):
            for position in range(run.start, run.stop, tokens):
                count = min(tokens, run.stop - position)
                num_keys = max(longest, position + count)
                if tiles and (end + count - begin) * -(-num_keys // SPLIT) * row_bytes > _PARTS_BYTES:
                    yield self._launch(slice(begin, end), tiles, longest)
                    tiles = []
                    begin = end
                    num_keys = position + count
                tiles.append((end - begin, count, position, sequence))
                end = end + count
                longest = num_keys
        yield self._launch(slice(begin, end), tiles, longest)

    def _launch(
        self, rows: slice, tiles: list[tuple[int, int, int, int]], longest: int
    ) -> tuple[slice, QueryTiles, int]:
        on_device = torch.tensor(tiles, dtype=torch.int32).to(self._device)
        return rows, QueryTiles(on_device, self._table, self._lengths[rows]), longest
