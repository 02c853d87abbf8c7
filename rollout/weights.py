"""The weights of one rank of a rollout: a policy's parameters, replaced in place by each version that it takes."""

from pathlib import Path

import numpy as np
import torch

from ..comm.fleet import Fleet
from ..comm.messages.weights import WeightsPulled
from ..comm.recipe import CommSettings, LoraSettings
from ..comm.shared_memory import host_buffer
from ..relay.weights.checkpoint_source import CheckpointSource
from ..relay.weights.layout import Layout
from ..relay.weights.reader import WeightReader
from ..trainer.policy.adapter_files import read_adapter
from ..trainer.policy.lora import A, B, adapter_shapes, merged, target_layers
from ..trainer.policy.model import Policy, load_policy
from ..trainer.policy.tensor_parallel import TensorParallel, splits_for


class RolloutWeights:
    """Splits a policy over the ranks of `tensor_parallel`, moves it to `device`, and fills it with versions of a relay.

    policy: in host memory; with an adapter it has the weights of `model.path`, else none. run_dir: its checkpoints have the
    versions that no relay holds any more.
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        settings: CommSettings,
        run_dir: str | None = None,
        tensor_parallel: TensorParallel | None = None,
        device: torch.device | None = None,
        lora: LoraSettings | None = None,
    ) -> None:
        split = tensor_parallel or TensorParallel()
        device = device or policy.device
        self._content: _Whole | _Adapter
        if lora is None or not lora.rank:
            self._content = _Whole(policy, split, device)
        else:
            self._content = _Adapter(policy, split, device, lora)
        self.layout = self._content.layout
        """The layout of a whole version, as the relays serve it."""
        self.version = -1
        archive = None if run_dir is None else CheckpointSource(Path(run_dir), self._content.read_checkpoint)
        rank = split.rank if self.layout.tp > 1 else 0
        self._reader = WeightReader(fleet, self.layout, settings, archive, rank)

    def newest(self) -> int:
        """The newest version of the relay, -1 before the first; each turn of the loop calls it."""
        newest = self._reader.newest()
        return -1 if newest is None else newest

    def pull(self, deadline_s: float) -> WeightsPulled:
        """Take the newest version. The policy must not run meanwhile."""
        return self._switched(self._reader.pull(self._content.buffer, deadline_s))

    def pull_version(self, version: int) -> WeightsPulled:
        """Take one version, older ones included: from a relay that holds it, else from its checkpoint.

        Raises `VersionNotAvailable` if neither has it; the weights are undefined then.
        """
        return self._switched(self._reader.pull_version(version, self._content.buffer))

    def _switched(self, pulled: WeightsPulled) -> WeightsPulled:
        self._content.apply()
        self.version = pulled.version
        return pulled

    def close(self) -> None:
        self._reader.close()


class _Whole:
    """A version has all weights: the policy's parameters are views of its bytes. For a GPU, one copy moves them there."""

    def __init__(self, policy: Policy, tensor_parallel: TensorParallel, device: torch.device) -> None:
        weights = policy.weights()
        self.layout = Layout.of(weights, policy.dtype, tensor_parallel.size, splits_for(weights, policy.config))
        own = self.layout.of_rank(tensor_parallel.rank)
        self.buffer: np.ndarray = host_buffer(own.num_bytes)
        self._dtype = policy.dtype
        self._flat = torch.from_numpy(self.buffer).to(device)
        """The bytes that the parameters are views of: those in `buffer`, or on another device a copy."""
        policy.split(tensor_parallel)
        policy.bind(own.views(self._flat))
        policy.to(device)

    def apply(self) -> None:
        """Use the bytes in `buffer`."""
        if self._flat.device.type != "cpu":
            self._flat.copy_(torch.from_numpy(self.buffer))

    def read_checkpoint(self, folder: Path) -> dict[str, torch.Tensor]:
        return load_policy(folder / "hf", self._dtype).weights()


class _Adapter:
    """A version has an adapter: the policy's parameters are computed from it and from the first weights, kept in host memory.

    Decoding costs the same as without an adapter, and no rounding adds up over versions.
    """

    def __init__(
        self, policy: Policy, tensor_parallel: TensorParallel, device: torch.device, settings: LoraSettings
    ) -> None:
        self._targets = target_layers(policy.model, settings.targets)
        self._scaling = settings.alpha / settings.rank
        self._splits = splits_for([f"{name}.weight" for name in self._targets], policy.config)
        self._tensor_parallel = tensor_parallel
        self._device = device
        self.layout = Layout.of(adapter_shapes(self._targets, settings.rank), torch.float32)
        self.buffer: np.ndarray = host_buffer(self.layout.num_bytes)
        policy.split(tensor_parallel)
        self._base = {name: layer.weight.detach().clone() for name, layer in self._targets.items()}
        weights = policy.weights()
        whole = Layout.of(weights, policy.dtype)
        views = whole.views(torch.empty(whole.num_bytes, dtype=torch.uint8, device=device))
        for name, weight in weights.items():
            views[name].copy_(weight.detach())
        policy.bind(views)  # side by side, as without an adapter: fused products need no copy of them on a GPU
        policy.to(device)

    @torch.no_grad()
    def apply(self) -> None:
        """Merge the adapter in `buffer`."""
        matrices = self.layout.views(torch.from_numpy(self.buffer).to(self._device))
        for name, layer in self._targets.items():
            a = matrices[f"{name}.{A}"]
            b = matrices[f"{name}.{B}"]
            if self._tensor_parallel.size > 1 and (split := self._splits.get(f"{name}.weight")) is not None:
                b, a = self._tensor_parallel.slice_factors(b, a, split)
            layer.weight.copy_(merged(self._base[name].to(self._device), a, b, self._scaling))

    def read_checkpoint(self, folder: Path) -> dict[str, torch.Tensor]:
        return read_adapter(folder / "adapter")
