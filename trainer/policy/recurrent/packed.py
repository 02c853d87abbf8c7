"""The recurrence of training: every row from its first token on, whatever it is packed with. Differentiable."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..attention import PaddedClasses
from ..device import to_device
from .delta_rule import read_in_chunks
from .network import DeltaNet, Projected

if TYPE_CHECKING:
    from ..prefix_tree import PrefixTree


class PackedRecurrence:
    """Whole sequences packed one after the other. Those of about equal length are padded on the right into one batch: no token reads what follows it."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._padded = PaddedClasses(lengths, device)

    def __call__(self, layer: int, net: DeltaNet, projected: Projected) -> Tensor:
        outputs = []
        for tokens, size in self._padded.classes:
            mixed, decay, beta = (
                x.index_select(0, tokens).unflatten(0, size) for x in (projected.mixed, projected.decay, projected.beta)
            )
            read, _ = read_in_chunks(*net.convolve(mixed), decay, beta)
            outputs.append(read.flatten(0, 1))
        return self._padded.unpad(outputs)


class TreeRecurrence:
    """The tokens of a prefix tree. States are computed for each row from its first token on; a shared token takes what it reads in the first of its rows."""

    def __init__(self, tree: "PrefixTree", device: torch.device | str = "cpu") -> None:
        self._rows = PackedRecurrence(tree.lengths, device)
        _, firsts = np.unique(tree.row_nodes, return_index=True)
        self._nodes = to_device(torch.from_numpy(tree.row_nodes), device)
        self._firsts = to_device(torch.from_numpy(firsts), device)

    def __call__(self, layer: int, net: DeltaNet, projected: Projected) -> Tensor:
        mixed, decay, beta = (
            x.index_select(0, self._nodes) for x in (projected.mixed, projected.decay, projected.beta)
        )
        of_rows = projected._replace(mixed=mixed, decay=decay, beta=beta)
        return self._rows(layer, net, of_rows).index_select(0, self._firsts)
