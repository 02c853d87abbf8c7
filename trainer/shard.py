"""Tensor parallelism of decoding: which part of a layer one rank of a replica holds, and how the parts are summed."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..comm.errors import SettingError


class Shard:
    """One rank's share: its heads and its columns of the MLP. Without a group it is everything."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    def cut(self, weight: Tensor | None, dim: int = 0) -> Tensor | None:
        """This rank's part along a dimension."""
        return None if weight is None else weight.chunk(self.size, dim)[self.rank]

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, in place."""
        assert self._group is not None
        self._group.allreduce([part]).wait()
        return part

    def agree(self, tokens: Tensor) -> Tensor:
        """The first rank's tokens, on every rank, in place: no rank may go another way for a last bit."""
        if self._group is not None:
            self._group.broadcast([tokens], dist.BroadcastOptions()).wait()
        return tokens

    def check(self, config: Any) -> None:
        """Raise SettingError if the policy does not divide by the number of ranks."""
        sizes = {
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "intermediate_size": config.intermediate_size,
        }
        for name, value in sizes.items():
            if value % self.size:
                raise SettingError(f"rollout.tp: {self.size} ranks do not divide the policy's {name} of {value}")
