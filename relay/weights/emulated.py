"""The weights of an emulated policy: a small buffer that really travels, and the seconds that real weights would take."""

import torch
from torch import Tensor

from ...comm.recipe import EmulatedSettings
from ..queue.schedules import SCHEDULES


class EmulatedTransfer:
    """Seconds that a version takes on each part of its way: by relays, or by a broadcast to all."""

    def __init__(self, settings: EmulatedSettings, schedule: str) -> None:
        e = settings
        if e.colocated:
            self.push_s, self.chain_s, self.pull_s = 0.0, 0.0, e.weights_gb / e.reshard_gb_s
        elif SCHEDULES[schedule].broadcasts:
            broadcast_s = e.weights_gb / e.broadcast_gb_s
            self.push_s, self.chain_s, self.pull_s = broadcast_s, 0.0, broadcast_s
        else:
            self.push_s = e.weights_gb / e.push_gb_s
            self.chain_s = e.weights_gb / e.chain_gb_s
            self.pull_s = e.weights_gb / e.gpus_per_rollout / e.pull_gb_s


def dummy_weights(settings: EmulatedSettings) -> dict[str, Tensor]:
    """The small buffer that is really pushed and pulled."""
    return {"weights": torch.zeros(settings.buffer_kb * 256, dtype=torch.float32)}
