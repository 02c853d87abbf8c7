"""Paged decode attention on CUDA: own Triton kernels, flash-attn, PyTorch's `varlen_attn`. All read a page table on the device."""

from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....comm.errors import SettingError
from ..to_device import to_device

if TYPE_CHECKING:
    from ....trainer.policy.attention import AttentionSpec
    from ....trainer.policy.decoder import HeadRule
    from ..batch import DecodeBatch
    from ..kv_cache import KVCache

FLASH_PAGE = 256
"""The page size of FlashAttention-2 is a multiple of this."""


class TableAttention:
    """Base of the CUDA back-ends, with `table` int32 [B, P] and `lengths` int32 [B], the step's own token included.

    `prepare` takes them from a batch; a captured graph gives tensors of its own to `use`.
    """

    name = ""

    def __init__(self, cache: "KVCache") -> None:
        self.cache = cache
        self.use(torch.zeros(0, 0, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
        self._generation = -1

    def prepare(self, batch: "DecodeBatch") -> None:
        if self._generation != batch.generation:
            self._generation = batch.generation
            width = int(batch.num_pages.max())
            self.table = to_device(batch.table[:, :width].astype(np.int32), batch.device)
        self.use(self.table, to_device((batch.positions + 1).astype(np.int32), batch.device))

    def use(self, table: Tensor, lengths: Tensor) -> None:
        """Use these tables from now on."""
        self.table = table
        self.lengths = lengths
        self._cache_rows: Tensor | None = None

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: "AttentionSpec") -> Tensor:
        if self._cache_rows is None:
            self._cache_rows = self._rows_of_newest()
        self.cache.write(layer, self._cache_rows, key, value)
        return self.attend(query, self.cache.keys[layer], self.cache.values[layer], rule)

    def _rows_of_newest(self) -> Tensor:
        """Rows of the cache for the steps' own tokens; a row beyond its table takes its last page."""
        page_size = self.cache.page_size
        positions = self.lengths.long() - 1
        columns = (positions // page_size).clamp_(max=self.table.shape[1] - 1)
        pages = self.table.gather(1, columns[:, None])[:, 0].long()
        return self.cache.cache_rows(pages * page_size + positions % page_size)

    def of_projection(self, layer: int, qkv: Tensor, heads: "HeadRule", rule: "AttentionSpec") -> Tensor:
        """See `ProjectionAttention`; a decoder calls it where Triton is installed."""
        from ....trainer.policy.kernels.heads import store_heads

        keys = self.cache.keys[layer]
        values = self.cache.values[layer]
        query = store_heads(qkv, heads, (keys, values), self.table, self.lengths)
        return self.attend(query, keys, values, rule)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: "AttentionSpec") -> Tensor:
        """Attention of query [B, heads, d] over keys and values [pages, kv_heads, page_size, d]."""
        raise NotImplementedError


class TritonAttention(TableAttention):
    """Own kernels: any page size, any head size, windows, soft-capping and sinks."""

    name = "triton"

    def __init__(self, cache: "KVCache") -> None:
        super().__init__(cache)
        from .triton_decode import paged_decode  # Triton is installed only where there is a GPU

        self._paged_decode = paged_decode

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: "AttentionSpec") -> Tensor:
        return self._paged_decode(query, keys, values, self.table, self.lengths, *rule)


class ExactTableAttention(TableAttention):
    """The kernels of exact mode, which prefill and training launch too."""

    name = "triton"

    def use(self, table: Tensor, lengths: Tensor) -> None:
        # Triton is installed only where there is a GPU.
        from ....trainer.policy.kernels.exact_attention import QueryTiles

        super().use(table, lengths)
        self._queries = QueryTiles.of_newest(table, lengths)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: "AttentionSpec") -> Tensor:
        from ....trainer.policy.kernels.exact_attention import exact_paged_attention

        num_keys = self.table.shape[1] * self.cache.page_size
        return exact_paged_attention(query, keys, values, self._queries, num_keys, rule)


class FlashAttention(TableAttention):
    """flash-attn's decode kernel; one split, so that a row's bits do not depend on the other rows."""

    name = "flash"

    def __init__(self, cache: "KVCache") -> None:
        super().__init__(cache)
        try:
            from flash_attn import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports] - an extra
        except ImportError as error:  # such as one that was built for another version of torch
            raise SettingError(f"generator.attention: flash-attn cannot be loaded: {error}") from error
        self._kernel: Any = flash_attn_with_kvcache

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: "AttentionSpec") -> Tensor:
        out = self._kernel(
            query[:, None], keys.transpose(1, 2), values.transpose(1, 2), cache_seqlens=self.lengths,
            block_table=self.table, softmax_scale=rule.scale, causal=True, num_splits=1, softcap=rule.softcap or 0.0,
            window_size=(-1, -1) if rule.window is None else (rule.window - 1, 0),
        )  # fmt: skip
        return out[:, 0]


class VarlenAttention(TableAttention):
    """PyTorch's `varlen_attn` with block tables; one split, because its split path leaves rows unwritten."""

    name = "varlen"

    def __init__(self, cache: "KVCache") -> None:
        super().__init__(cache)
        from torch.nn.attention.varlen import varlen_attn

        self._kernel: Any = varlen_attn

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: "AttentionSpec") -> Tensor:
        starts = torch.arange(len(query) + 1, device=query.device, dtype=torch.int32)
        key_starts = F.pad(self.lengths.cumsum(0, dtype=torch.int32), (1, 0))
        longest = self.table.shape[1] * self.cache.page_size
        return self._kernel(
            query.contiguous(), keys.transpose(1, 2), values.transpose(1, 2), starts, key_starts, 1, longest, scale=rule.scale,
            window_size=(-1, 0) if rule.window is None else (rule.window - 1, 0), enable_gqa=True,
            seqused_k=self.lengths, block_table=self.table, num_splits=1,
        )  # fmt: skip


def has_varlen() -> bool:
    """Whether this PyTorch's `varlen_attn` takes block tables (2.12 and later)."""
    if find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return "block_table" in signature(varlen_attn).parameters
