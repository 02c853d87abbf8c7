"""The way of a layer's projection into paged attention in one launch: norms of heads, rotation, keys and values into the cache."""

# Kernels are written in Triton's language, and Triton is installed only where there is a GPU.
# ruff: noqa: ANN001, ANN202
# pyright: reportMissingImports=false, reportIndexIssue=false

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from ..decoder import HeadRule


@triton.jit(do_not_specialize=["table_width"])
def _heads_kernel(
    qkv, cos, sin, query_norm, key_norm, table, lengths, query, keys, values, eps, table_width, table_stride, page_stride,
    head_stride, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    HALF_ROWS: tl.constexpr, REST_ROWS: tl.constexpr, DIM_ROWS: tl.constexpr, PAGE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """One head of one row. A head is two halves that rotate into each other, and the rest."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    source = qkv + (row.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head) * DIM
    position = tl.load(lengths + row) - 1
    page = tl.load(table + row * table_stride + tl.minimum(position // PAGE, table_width - 1)).to(tl.int64)
    place = page * page_stride + (position % PAGE) * DIM
    if head >= HEADS + KV_HEADS:
        dims = tl.arange(0, DIM_ROWS)
        value = tl.load(source + dims, mask=dims < DIM, other=0.0)
        tl.store(values + place + (head - HEADS - KV_HEADS) * head_stride + dims, value, mask=dims < DIM)
    else:
        half = tl.arange(0, HALF_ROWS)
        rest = tl.arange(0, REST_ROWS)
        is_half = half < HALF
        is_rest = rest < REST
        a = tl.load(source + half, mask=is_half, other=0.0).to(tl.float32)
        b = tl.load(source + HALF + half, mask=is_half, other=0.0).to(tl.float32)
        c = tl.load(source + 2 * HALF + rest, mask=is_rest, other=0.0).to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0) + tl.sum(c * c, 0)) / DIM + eps)
            norm = query_norm if head < HEADS else key_norm
            a *= scale * tl.load(norm + half, mask=is_half, other=0.0).to(tl.float32)
            b *= scale * tl.load(norm + HALF + half, mask=is_half, other=0.0).to(tl.float32)
            c *= scale * tl.load(norm + 2 * HALF + rest, mask=is_rest, other=0.0).to(tl.float32)
        angles = row * 2 * HALF + half
        new_a = a * tl.load(cos + angles, mask=is_half, other=0.0) + b * tl.load(sin + angles, mask=is_half, other=0.0)
        angles += HALF
        new_b = b * tl.load(cos + angles, mask=is_half, other=0.0) + a * tl.load(sin + angles, mask=is_half, other=0.0)
        target = query + (row.to(tl.int64) * HEADS + head) * DIM
        if head >= HEADS:
            target = keys + place + (head - HEADS) * head_stride
        kind = query.dtype.element_ty
        tl.store(target + half, new_a.to(kind), mask=is_half)
        tl.store(target + HALF + half, new_b.to(kind), mask=is_half)
        tl.store(target + 2 * HALF + rest, c.to(kind), mask=is_rest)


def store_heads(qkv: Tensor, rule: "HeadRule", cache: tuple[Tensor, Tensor], table: Tensor, lengths: Tensor) -> Tensor:
    """Queries [B, heads, d] of a projection qkv [B, heads + 2 * kv_heads, d], rotated; its keys and values go to the cache.

    cache: keys and values [pages, kv_heads, page_size, d]; table int32 [B, P] of page numbers; lengths int32 [B] of tokens,
    the row's own included, which is the last. Computed in fp32. A row beyond its table is written into its last page.
    """
    keys, values = cache
    rows, _, dim = qkv.shape
    _, kv_heads, page, _ = keys.shape
    assert qkv.is_contiguous() and keys.is_contiguous() and values.is_contiguous()
    heads = qkv.shape[1] - 2 * kv_heads
    half = rule.cos.shape[-1] // 2
    query = torch.empty(rows, heads, dim, dtype=qkv.dtype, device=qkv.device)
    query_norm, key_norm = (qkv if norm is None else norm for norm in (rule.query_norm, rule.key_norm))
    _heads_kernel[(rows, heads + 2 * kv_heads)](
        qkv, rule.cos, rule.sin, query_norm, key_norm, table, lengths, query, keys, values, rule.eps, table.shape[1],
        table.stride(0), keys.stride(0), keys.stride(1), HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HALF=half,
        REST=dim - 2 * half, HALF_ROWS=triton.next_power_of_2(half), REST_ROWS=triton.next_power_of_2(max(1, dim - 2 * half)),
        DIM_ROWS=triton.next_power_of_2(dim), PAGE=page, HAS_NORM=rule.query_norm is not None, num_warps=1,
    )  # fmt: skip
    return query
