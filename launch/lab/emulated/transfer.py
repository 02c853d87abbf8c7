"""The weights of an emulated policy: a small buffer that really travels, and the seconds that real weights would take."""

import torch
from torch import Tensor

from ....relay.queue.schedules import SCHEDULES
from ..settings import LabSettings

BUFFER_BYTES = 1 << 16


class EmulatedTransfer:
    """Seconds that a version takes on each part of its way: by relays, or by a broadcast to all where the devices have one."""

    def __init__(self, settings: LabSettings, schedule: str) -> None:
        if settings.colocated:
            self.push_s = 0.0
            self.chain_s = 0.0
            self.pull_s = settings.weights_gb / settings.reshard_gb_s
        elif SCHEDULES[schedule].broadcasts and settings.broadcast_gb_s is not None:
            broadcast_s = settings.weights_gb / settings.broadcast_gb_s
            self.push_s = broadcast_s
            self.chain_s = 0.0
            self.pull_s = broadcast_s
        else:
            self.push_s = settings.weights_gb / settings.push_gb_s
            self.chain_s = settings.weights_gb / settings.chain_gb_s
            self.pull_s = settings.weights_gb / settings.gpus_per_rollout / settings.pull_gb_s


def dummy_weights() -> dict[str, Tensor]:
    """The small buffer that is really pushed and pulled."""
    return {"weights": torch.zeros(BUFFER_BYTES // 4, dtype=torch.float32)}
