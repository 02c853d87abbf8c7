"""Tensors between the host and the device of the trainer, so that neither waits for the other within a batch."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A host's tensor on this device. A GPU copies it from pinned memory in its turn: a copy from other memory waits for all before it."""
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def finish_work(device: torch.device) -> None:
    """Wait until the device has done what it was asked for. A host that only queues it would count the time as waiting for groups."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class DeviceSums:
    """Named sums, and maxima of numbers from 0 up, in float64 on the device of what is added. Only `read` waits for the device."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], Tensor] = {}
        """[names] of each group of names."""
        self._maxima: dict[tuple[str, ...], Tensor] = {}

    def add(self, **figures: Tensor) -> None:
        """Add a number to each of these sums."""
        self._add(tuple(figures), torch.stack([*figures.values()]).double())

    def add_by_token(self, **figures: tuple[Tensor, Tensor]) -> None:
        """Add numbers [R], each where its mask [R] is set; they need not be finite elsewhere."""
        self._add(tuple(figures), _masked(figures).sum(1))

    def raise_by_token(self, **figures: tuple[Tensor, Tensor]) -> None:
        """Make each maximum at least the largest of these numbers [R] where its mask [R] is set. R > 0. NaN counts as 0."""
        names = tuple(figures)
        # A maximum carries a NaN on, which would hide the other numbers of the step.
        found = _masked(figures).nan_to_num(posinf=math.inf).amax(1)
        self._maxima[names] = torch.maximum(self._maxima[names], found) if names in self._maxima else found

    def read(self) -> tuple[dict[str, float], dict[str, float]]:
        """The sums and the maxima so far; they begin again afterwards."""
        parts = (self._sums, self._maxima)
        tensors = [tensor for part in parts for tensor in part.values()]
        values: Iterator[float] = iter(torch.cat(tensors).tolist() if tensors else [])
        sums, maxima = ({name: next(values) for names in part for name in names} for part in parts)
        self._sums, self._maxima = {}, {}
        return sums, maxima

    def _add(self, names: tuple[str, ...], values: Tensor) -> None:
        self._sums[names] = self._sums[names] + values if names in self._sums else values


def _masked(figures: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    """[figures, R] float64, 0 outside of the masks."""
    numbers, masks = zip(*figures.values(), strict=True)
    return torch.stack(numbers).double().where(torch.stack(masks), 0.0)
