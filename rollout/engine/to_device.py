"""Copies from the host to the engine's device that do not wait for the steps under way there."""

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray, device: torch.device | str) -> Tensor:
    """The values on the device; on the CPU a view of them. For a GPU they are copied to pinned memory first, so they may
    change at once, and the copy to the device is queued behind its work."""
    tensor = torch.from_numpy(values)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
