"""Classes of sequences of about equal length, to be padded into one batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .device import to_device


def length_classes(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of `lengths` by class, the longest first in each; a class pads by at most an eighth of its longest, or 8 tokens."""
    classes: list[list[int]] = []
    shortest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not classes or lengths[index] < shortest:
            classes.append([])
            shortest = lengths[index] - max(8, lengths[index] // 8)
        classes[-1].append(index)
    return classes


class PaddedClasses:
    """Packed sequences as one batch for each class, padded on the right by copies of their last tokens."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.classes: list[tuple[Tensor, tuple[int, int]]] = []
        """For each class its tokens [members * longest], and (members, longest)."""
        self.members: list[list[int]] = length_classes(lengths)
        """The sequences of each class."""
        starts = torch.tensor([0, *lengths]).cumsum(0)
        inverse = torch.empty(sum(lengths), dtype=torch.long)
        padded = 0
        for members in self.members:
            sizes = torch.tensor([lengths[index] for index in members])
            longest = int(sizes[0])
            offsets = torch.arange(longest)
            tokens = starts[members][:, None] + torch.minimum(offsets[None, :], sizes[:, None] - 1)
            is_real = offsets[None, :] < sizes[:, None]
            inverse[tokens[is_real]] = padded + is_real.flatten().nonzero().flatten()
            self.classes.append((to_device(tokens.flatten(), device), (len(members), longest)))
            padded += tokens.numel()
        self._inverse = to_device(inverse, device)

    def unpad(self, outputs: list[Tensor]) -> Tensor:
        """[T, ...] of the packed sequences, from [members * longest, ...] of each class."""
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out.index_select(0, self._inverse)
