"""The weights of one rollout: one flat buffer that the policy's parameters are views of, refilled in place."""

from pathlib import Path

import torch

from ..comm.fleet import Fleet
from ..comm.settings import CommSettings
from ..relay.archive import Archive
from ..relay.layout import Layout, host_buffer
from ..relay.weights import Receipt, WeightReader
from ..trainer.model import Policy, load_policy


class RolloutWeights:
    """Binds a policy to a flat buffer; `pull` replaces all weights at once with the newest version of a relay.

    On a GPU the bytes land in host memory first, and one copy puts them on the device.
    """

    def __init__(self, fleet: Fleet, policy: Policy, settings: CommSettings, run_dir: str | None = None) -> None:
        """`run_dir` is where checkpoints have what no relay holds any more."""
        self.layout = Layout.of(policy.weights(), policy.dtype)
        self.version = -1
        self.pull_s = 0.0
        self._host = host_buffer(self.layout.num_bytes)
        archive = None
        if run_dir is not None:
            archive = Archive(Path(run_dir), lambda folder: load_policy(folder, policy.dtype).weights())
        self._reader = WeightReader(fleet, self.layout, settings, archive)
        self._device: torch.Tensor | None = None
        flat = torch.from_numpy(self._host)
        if policy.device.type != "cpu":
            flat = self._device = flat.to(policy.device)
        policy.bind(self.layout.views(flat))

    def newest(self) -> int:
        """The newest complete version that the relay shows; -1 before the first."""
        newest = self._reader.newest()
        return -1 if newest is None else newest

    def pull(self, deadline_s: float) -> Receipt:
        """Take the newest version; nobody may run the policy meanwhile."""
        return self._took(self._reader.pull(self._host, deadline_s))

    def pull_version(self, version: int) -> Receipt:
        """Take one version, older ones included: from a relay that holds it, else from the trainer's checkpoint of its step.

        Raises `NothingReadable` if neither has it.
        """
        return self._took(self._reader.pull_version(version, self._host))

    def _took(self, receipt: Receipt) -> Receipt:
        if self._device is not None:
            self._device.copy_(torch.from_numpy(self._host))
        self.version = receipt.version
        return receipt

    def close(self) -> None:
        self._reader.close()
