"""The tensors of recurrent states. `state_pool.py` says which places are in use."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ....trainer.policy.recurrent.network import DeltaNet, state_type
from ..kv_cache import copy_as_ordered, lazy_zeros


class StateCache:
    """States of all recurrent layers by place; place 0 is zero.

    windows: for each layer the last inputs of the convolution [places, width - 1, channels]. matrices: for each layer the states of the
    delta rule [places, heads, key d, value d], in fp32 at least.
    """

    def __init__(
        self, nets: Mapping[int, DeltaNet], num_places: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._device = torch.device(device)
        wide = state_type(dtype)
        self.windows: dict[int, Tensor] = {}
        self.matrices: dict[int, Tensor] = {}
        for layer, net in nets.items():
            self.windows[layer] = lazy_zeros((num_places + 1, *net.shape.window), dtype, self._device)
            self.matrices[layer] = lazy_zeros((num_places + 1, *net.shape.matrices), wide, self._device)

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy states (source, target) as if one after the other."""
        copy_as_ordered(copies, self._tensors, self._device)

    def export(self, place: int) -> Tensor:
        """The state of all layers as bytes, uint8 [num_bytes], on the host."""
        return torch.cat([tensor[place].flatten().view(torch.uint8) for tensor in self._tensors]).cpu()

    def load(self, place: int, exported: Tensor) -> None:
        """Write the result of `export` into a place."""
        parts = [tensor[place] for tensor in self._tensors]
        sizes = [part.numel() * part.element_size() for part in parts]
        for part, data in zip(parts, exported.split(sizes), strict=True):
            part.copy_(data.clone().view(part.dtype).view(part.shape))

    @property
    def window_length(self) -> int:
        """Inputs of the convolution that a state has."""
        return next(iter(self.windows.values())).shape[1]

    @property
    def state_bytes(self) -> int:
        """Bytes of one place."""
        return sum(tensor[0].numel() * tensor.element_size() for tensor in self._tensors)

    @property
    def _tensors(self) -> list[Tensor]:
        return [*self.windows.values(), *self.matrices.values()]
