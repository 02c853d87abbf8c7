"""Tensor parallelism of decoding: the slice of each layer that one rank of a replica holds, and the sums over the ranks.

A layer is split as in Megatron-LM (arXiv 1909.08053, section 3): query, key, value, gate and up by output rows, so that each
rank has whole heads; the projections back into the residual by input columns, with their products summed over the ranks.
Embedding, norms and LM head are whole on every rank.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm.tensor_split import TensorSplit
from .families import Widths

_BY_ROWS = frozenset(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
_BY_COLUMNS = frozenset(("o_proj", "down_proj"))


class TensorParallel:
    """One rank of a replica; without a group, the only one."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    def slice(self, weight: Tensor, split: TensorSplit) -> Tensor:
        """This rank's slice of a whole parameter; a copy."""
        rows, columns = split.slice_for_rank(tuple(weight.shape), self.rank, self.size)
        part = torch.cat([weight[start:end] for start, end in rows])
        return part if columns is None else part[:, slice(*columns)].contiguous()

    def slice_factors(self, b: Tensor, a: Tensor, split: TensorSplit) -> tuple[Tensor, Tensor]:
        """Factors of this rank's slice of the product b a, a whole parameter."""
        rows, columns = split.slice_for_rank((len(b), a.shape[1]), self.rank, self.size)
        part = torch.cat([b[start:end] for start, end in rows])
        return part, a if columns is None else a[:, slice(*columns)]

    def all_reduce_sum(self, part: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        assert self._group is not None
        self._group.allreduce([part]).wait()
        return part

    def broadcast_tokens(self, tokens: Tensor) -> None:
        """Rank 0's tokens on every rank, in place: a difference in the last bit must not make the ranks diverge."""
        if self._group is not None:
            self._group.broadcast([tokens], dist.BroadcastOptions()).wait()

    def all_reduce_min(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values."""
        if self._group is None:
            return value
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # pyright: ignore[reportAttributeAccessIssue]
        tensor = torch.tensor([value], device=device)
        self._group.allreduce([tensor], options).wait()
        return int(tensor)


def splits_for(weights: Iterable[str], config: Any) -> dict[str, TensorSplit]:
    """How the ranks of a replica share the parameters of these names; each rank holds the others whole."""
    splits = {name: _split_of(name, config) for name in weights}
    return {name: split for name, split in splits.items() if split is not None}


def _split_of(name: str, config: Any) -> TensorSplit | None:
    module, _, kind = name.rpartition(".")
    module = module.rpartition(".")[2]
    if module == "qkv_proj":
        widths = Widths.of(config)
        counts = (widths.heads, widths.kv_heads, widths.kv_heads)
        return TensorSplit(0, tuple(heads * widths.head_dim for heads in counts))
    if module == "gate_up_proj":
        width = Widths.of(config).mlp
        return TensorSplit(0, (width, width))
    if module in _BY_ROWS:
        return TensorSplit(0)
    return TensorSplit(1) if module in _BY_COLUMNS and kind == "weight" else None
