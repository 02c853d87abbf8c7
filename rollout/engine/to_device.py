"""Copies from the host to the engine's device that do not wait for the steps under way there."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ...comm.errors import SettingError

_ALIGNMENT = 16
"""Bytes; a multiple of every number's size."""


def to_device(values: np.ndarray, device: torch.device | str) -> Tensor:
    """The values on the device; on the CPU a view of them. For a GPU they are copied to pinned memory first, so they may
    change at once, and the copy to the device is queued behind its work."""
    tensor = torch.from_numpy(values)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_device_together(arrays: Mapping[str, np.ndarray], device: torch.device | str) -> dict[str, Tensor]:
    """`to_device` of several contiguous arrays in one copy, by name."""
    if torch.device(device).type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]
    packed = np.zeros(sum(sizes), dtype=np.uint8)
    starts = np.cumsum([0, *sizes])
    for start, array in zip(starts, arrays.values(), strict=False):
        packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    parts = to_device(packed, device).split(sizes)
    return {
        name: part[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for (name, array), part in zip(arrays.items(), parts, strict=True)
    }


def check_device(device: torch.device) -> None:
    """Refuse a GPU that is not this process's current device, on which kernels are launched and events recorded.

    Raises SettingError.
    """
    if device.type != "cuda" or device.index is None:
        return
    current = torch.cuda.current_device()
    if device.index != current:
        raise SettingError(
            f"device={device}: the current device of this process is cuda:{current}; call torch.cuda.set_device({device.index})"
            " before the engine is made, or choose the GPU by CUDA_VISIBLE_DEVICES"
        )
