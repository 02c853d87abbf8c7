"""Attention of exact mode on a CPU, one call per page with query rows padded to a multiple of ROWS.

One row of an SDPA call is a tile of PAGE queries against one page, with the query heads folded into rows. The results of a
query's pages are merged in the order of the pages.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention import AttentionSpec, band
from .operators import PAGE, Run

ROWS = 4
"""Query rows of a call are a multiple of this: the kernel computes one or two rows in another way."""
MASKED_SCORE = -1e30
"""Added to a masked score; finite, so that a page without a valid key does not give NaN."""


def attend_pages(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of row i's queries over page i alone: outputs [N, kv_heads, R, d] and log-sum-exps [N, kv_heads, R].

    q [N, kv_heads, R, d]; k and v [N, kv_heads, page, d]; bias broadcast to [N, kv_heads, R, page].
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias, scale=scale)


def merge_in_order(out: Tensor, lse: Tensor, parts: Tensor) -> Tensor:
    """Merge partial results page by page: `out` [N, ...rest, d] and `lse` [N, ...rest]; `parts` [Q, P] are rows of them.

    A part without a valid key has a log-sum-exp near MASKED_SCORE and does not change a bit of the result.
    """
    lses = [lse.index_select(0, column) for column in parts.unbind(1)]
    peak = torch.stack(lses).amax(0)
    total = torch.zeros_like(peak)
    merged = torch.zeros((*peak.shape, out.shape[-1]), device=out.device)
    for column, part in zip(parts.unbind(1), lses, strict=True):
        weight = torch.exp(part - peak)
        total = total + weight
        merged = merged + out.index_select(0, column).float() * weight[..., None]
    return (merged / total[..., None]).to(out.dtype)


class TileAttention:
    """See `PagesAttention`."""

    def __init__(self, runs: Sequence[Run], device: torch.device | str = "cpu") -> None:
        tiles: list[list[int]] = []
        pairs: list[tuple[int, int, int]] = []
        parts: list[list[int]] = []
        spots: list[int] = []
        first = 0
        for run in runs:
            for tile in range(run.start // PAGE, -(-run.stop // PAGE)):
                begin = max(run.start, tile * PAGE)
                end = min(run.stop, tile * PAGE + PAGE)
                spots += [len(tiles) * PAGE + p % PAGE for p in range(begin, end)]
                parts.append(list(range(len(pairs), len(pairs) + tile + 1)))
                pairs += [(len(tiles), run.pages[j], tile - j) for j in range(tile + 1)]
                tiles.append(
                    [first + min(max(p, begin), end - 1) - run.start for p in range(tile * PAGE, tile * PAGE + PAGE)]
                )
            first += run.stop - run.start
        width = max(len(p) for p in parts)
        # A missing part points to an extra row without a valid key.
        self._parts = torch.tensor([p + [len(pairs)] * (width - len(p)) for p in parts], device=device)
        self._tiles = torch.tensor(tiles, device=device).flatten()
        self._pairs = torch.tensor(pairs, device=device).t()
        self._spots = torch.tensor(spots, device=device)
        self._num_tiles = len(tiles)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        num_kv_heads = keys.shape[1]
        head_dim = keys.shape[3]
        groups = query.shape[1] // num_kv_heads
        tiles = query.index_select(0, self._tiles).view(self._num_tiles, PAGE, num_kv_heads, groups, head_dim)
        tiles = tiles.permute(0, 2, 1, 3, 4).reshape(self._num_tiles, num_kv_heads, PAGE * groups, head_dim)
        which, pages, distance = self._pairs.unbind(0)
        bias = self._bias(int(distance.max()) + 1, spec.window, groups, query)
        out, lse = attend_pages(
            tiles.index_select(0, which), keys.index_select(0, pages), values.index_select(0, pages),
            bias.index_select(0, distance), spec.scale,
        )  # fmt: skip
        nothing = lse.new_full((1, *lse.shape[1:]), MASKED_SCORE)
        out = torch.cat((out, out.new_zeros(1, *out.shape[1:])))
        lse = torch.cat((lse, nothing))
        merged = merge_in_order(out, lse, self._parts)
        merged = merged.view(self._num_tiles, num_kv_heads, PAGE, groups, head_dim).transpose(1, 2)
        return merged.flatten(0, 1).flatten(1, 2).index_select(0, self._spots)

    @staticmethod
    def _bias(num_distances: int, window: int | None, groups: int, like: Tensor) -> Tensor:
        """Bias of the scores of a query tile, by its distance in pages from the keys: [distances, 1, PAGE * groups, PAGE]."""
        sees = [band(PAGE, PAGE * (d + 1), window, like.device)[:, :PAGE] for d in range(num_distances)]
        bias = torch.where(torch.stack(sees), 0.0, MASKED_SCORE).to(like.dtype)
        return bias.repeat_interleave(groups, 1).unsqueeze(1)
