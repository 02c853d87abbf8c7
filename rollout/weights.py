"""The weights of one rank of a rollout: one flat buffer that the policy's parameters are views of, refilled in place."""

from pathlib import Path

import torch

from ..comm.fleet import Fleet
from ..comm.recipe import CommSettings
from ..relay.weights.checkpoint_source import CheckpointSource
from ..relay.weights.layout import Layout
from ..relay.weights.pinned import host_buffer
from ..relay.weights.reader import WeightReader
from ..relay.weights.slots import Receipt
from ..trainer.policy.model import Policy, load_policy
from ..trainer.policy.tensor_parallel import TensorParallel, splits_for


class RolloutWeights:
    """Binds a policy to a flat buffer; `pull` replaces all weights at once with the newest version of a relay.

    policy: without weights, in host memory; it is split over the ranks of `tensor_parallel` and moved to `device`. For a GPU
    the bytes arrive in host memory, and one copy moves them to the device. run_dir: its checkpoints have the versions that no
    relay holds any more.
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        settings: CommSettings,
        run_dir: str | None = None,
        tensor_parallel: TensorParallel | None = None,
        device: torch.device | None = None,
    ) -> None:
        tensor_parallel, device = tensor_parallel or TensorParallel(), device or policy.device
        weights = policy.weights()
        self.layout = Layout.of(weights, policy.dtype, tensor_parallel.size, splits_for(weights, policy.config))
        """The layout of a whole version, as the relays serve it."""
        self.version = -1
        own = self.layout.of_rank(tensor_parallel.rank)
        self._host = host_buffer(own.num_bytes)
        archive = None
        if run_dir is not None:
            archive = CheckpointSource(Path(run_dir), lambda folder: load_policy(folder, policy.dtype).weights())
        self._reader = WeightReader(fleet, self.layout, settings, archive, tensor_parallel.rank)
        self._device: torch.Tensor | None = None
        flat = torch.from_numpy(self._host)
        if device.type != "cpu":
            flat = self._device = flat.to(device)
        policy.split(tensor_parallel)
        policy.bind(own.views(flat))
        policy.to(device)

    def newest(self) -> int:
        newest = self._reader.newest()
        return -1 if newest is None else newest

    def pull(self, deadline_s: float) -> Receipt:
        """Take the newest version. The policy must not run meanwhile."""
        return self._switched(self._reader.pull(self._host, deadline_s))

    def pull_version(self, version: int) -> Receipt:
        """Take one version, older ones included: from a relay that holds it, else from its checkpoint.

        Raises `VersionNotAvailable` if neither has it.
        """
        return self._switched(self._reader.pull_version(version, self._host))

    def _switched(self, receipt: Receipt) -> Receipt:
        if self._device is not None:
            self._device.copy_(torch.from_numpy(self._host))
        self.version = receipt.version
        return receipt

    def close(self) -> None:
        self._reader.close()
