"""Tensor parallelism of decoding: which part of a layer one rank of a replica holds, and how the parts are summed.

A layer is cut as in Megatron-LM (arXiv 1909.08053, section 3): query, key, value, gate and up by output rows, so each rank
has whole heads; the projections back into the residual by input columns, whose products are then summed over the ranks.
Embedding, norms and LM head are whole on every rank.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm.errors import SettingError
from ...relay.weights.layout import TensorSplit
from .families import is_llama_line

_BY_ROWS = frozenset(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
_BY_COLUMNS = frozenset(("o_proj", "down_proj"))


class TensorParallel:
    """One rank's share of a replica. Without a group it is everything."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    def slice(self, weight: Tensor, split: TensorSplit) -> Tensor:
        """What this rank holds of a whole parameter that is shared so; a copy."""
        rows, columns = split.slice_for_rank(tuple(weight.shape), self.rank, self.size)
        part = torch.cat([weight[start:end] for start, end in rows])
        return part if columns is None else part[:, slice(*columns)].contiguous()

    def all_reduce_sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, in place."""
        assert self._group is not None
        self._group.allreduce([part]).wait()
        return part

    def broadcast_tokens(self, tokens: Tensor) -> Tensor:
        """The first rank's tokens, on every rank, in place: no rank may go another way for a last bit."""
        if self._group is not None:
            self._group.broadcast([tokens], dist.BroadcastOptions()).wait()
        return tokens

    def all_reduce_min(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values."""
        if self._group is None:
            return value
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # pyright: ignore[reportAttributeAccessIssue]
        tensor = torch.tensor([value], device=device)
        self._group.allreduce([tensor], options).wait()
        return int(tensor)


def check_splittable(config: Any, size: int) -> None:
    """Raise SettingError if a policy of this configuration cannot be split over `size` ranks."""
    if size == 1:
        return
    if not is_llama_line(config):
        raise SettingError(f"rollout.tp: model type '{config.model_type}' runs on one rank only, not on {size}")
    heads = config.num_attention_heads
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "intermediate_size": config.intermediate_size,
    }
    for name, value in sizes.items():
        if value % size:
            raise SettingError(f"rollout.tp: {size} ranks do not divide the policy's {name} of {value}")


def splits_for(weights: Iterable[str], config: Any) -> dict[str, TensorSplit]:
    """How the ranks of a replica share the parameters of these names; they hold the others whole."""
    cuts = {name: _split_of(name, config) for name in weights}
    return {name: cut for name, cut in cuts.items() if cut is not None}


def _split_of(name: str, config: Any) -> TensorSplit | None:
    module, _, kind = name.rpartition(".")
    module = module.rpartition(".")[2]
    if module == "qkv_proj":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        counts = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        return TensorSplit(0, tuple(heads * head_dim for heads in counts))
    if module == "gate_up_proj":
        return TensorSplit(0, (config.intermediate_size, config.intermediate_size))
    if module in _BY_ROWS:
        return TensorSplit(0)
    return TensorSplit(1) if module in _BY_COLUMNS and kind == "weight" else None
