"""The built-in learner: an actor with the reference policy, checkpoints, and the publisher of its weights."""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ...comm.disk import when_writable
from ...comm.fleet import Fleet
from ...comm.recipe import Recipe
from ...relay.checkpoints import CheckpointFolder
from ...relay.dataset.chat_template import own_template
from ...relay.queue.batch import Batch
from ...relay.weights.layout import Layout, WeightShard
from ...relay.weights.publisher import WeightPublisher
from ..actor_group import ActorGroup, gather_full, layer_type
from ..alarms.turn_tokens import turn_tokens
from ..checkpoint import save_state, staged
from ..export import export
from ..logprobs import response_logprobs
from ..policy.adapter_files import merged_weight
from ..policy.lora import adapter_weights, without_adapter
from ..policy.model import Policy, default_device, load_policy, load_tokenizer
from ..policy.tensor_parallel import splits_for
from ..step_metrics import StepMetrics
from .actor import Actor
from .state_copies import StateCopies


class ActorLearner(Actor):
    """An actor with checkpoints and the publisher of its shard of the weights."""

    def __init__(self, fleet: Fleet, recipe: Recipe) -> None:
        device = default_device()
        torch.manual_seed(recipe.run.seed)
        super().__init__(
            recipe, ActorGroup.join(fleet, recipe.roles.actor, device, recipe.comm.deadline_s, recipe.trainer)
        )
        self.reference: Policy | None = None
        self.tokenizer = load_tokenizer(recipe.model.path)
        self.turn_tokens = turn_tokens(self.tokenizer, self.policy.stop_ids)
        if template := own_template(recipe.data.chat_template):
            self.tokenizer.chat_template = template  # users of the exported policy ask it as training did
        self.copies = StateCopies.of_supervisor(fleet, self.state, self.group, Path(recipe.run.dir))
        self._checkpoint_team = self.group.clone_for_thread()
        self._staged_version = -1
        weights = self._published()
        layout = Layout.of(
            weights, recipe.model.compute_type, recipe.weight_slices, splits_for(weights, self.policy.config)
        )
        if recipe.lora.rank:
            layout = Layout.of(weights, torch.float32)
        shard = WeightShard.of(layout, weights, self.group.rank, self.group.size)
        self.publisher = WeightPublisher(fleet, layout, recipe.comm, shard, self.group.incarnation)
        self.num_bytes = layout.num_bytes

    def accumulate(self, batch: Batch, stats: StepMetrics) -> None:
        super().accumulate(batch, stats)
        stats.add_turns(batch, self.turn_tokens)

    def logprobs(self, batch: Batch) -> list[np.ndarray]:
        """The initial policy is the one without the adapter; where all weights are trained, it is loaded for the first batch."""
        if self.recipe.lora.rank:
            with without_adapter(self.policy.model):
                found = response_logprobs(self.policy, batch, self.group.device, self.recipe)
            self.group.reshard(self.policy)
            return found
        if self.reference is None:
            path = self.recipe.model.path
            group = self.group
            shard = partial(group.shard, layer_type=layer_type(self.recipe, self.policy))
            self.reference = load_policy(path, "float32", group.device, shard=shard)
        return response_logprobs(self.reference, batch, self.group.device, self.recipe)

    def publish(self) -> None:
        self.publisher.publish(self.version, self._published())

    def export(self) -> str:
        """Write the policy in Hugging Face format, and its adapter in peft's; a collective."""
        path = CheckpointFolder(Path(self.recipe.run.dir)).path(self.version)
        # A checkpoint that was given up for want of room has left nothing.
        is_there = self._staged_version == self.version and (path / "hf").exists()
        if self.group.all_reduce_max([float(self.group.is_lead and not is_there)])[0]:
            weights = self._whole_weights()
            deadline_s = self.recipe.comm.deadline_s
            when_writable(path, lambda: self._write_policy(path, weights), deadline_s)
        return str(path / "hf")

    def stage(self) -> Callable[[Path], None]:
        self._staged_version = self.version
        copies: dict[int, torch.Tensor] = {}
        held = None if self.copies is None else self.copies.hold(copies)
        release: Callable[[], object] = lambda: None
        state = staged(self.state.state_dict(), copies) if held is None else held[0]
        weights = self._whole_weights(copies)

        def write(folder: Path) -> None:
            try:
                save_state(state, folder, self._checkpoint_team)
                self._write_policy(folder, weights)
            finally:
                release()

        if self.copies is not None and held is not None:
            release = weakref.finalize(write, self.copies.release, held[1])  # `write` need not be called
        return write

    def _published(self) -> dict[str, torch.Tensor]:
        """The weights that make a version: those of the adapter, or all."""
        return adapter_weights(self.policy.model) if self.recipe.lora.rank else self.policy.weights()

    def _whole_weights(self, copies: Mapping[int, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """A copy of the policy's weights in rank 0's host memory, one at a time, merged with the adapter, and that; a collective.

        copies: of weights that are in host memory already, by the address of their bytes.
        """
        weights: dict[str, torch.Tensor] = {}
        adapter = {name: gather_full(matrix.detach()) for name, matrix in adapter_weights(self.policy.model).items()}
        scaling = self.recipe.lora.alpha / max(self.recipe.lora.rank, 1)
        for name, tensor in self.policy.weights().items():
            whole = adapter[name] if name in adapter else gather_full(tensor.detach())
            if self.group.is_lead:
                merged = merged_weight(name, whole, adapter, scaling)
                copy = (copies or {}).get(merged.data_ptr())
                is_same = copy is not None and (copy.shape, copy.dtype) == (merged.shape, merged.dtype)
                weights[name] = copy if copy is not None and is_same else merged.to("cpu", copy=True)
        return weights

    def _write_policy(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        if self.group.is_lead:
            export(folder, self.policy, weights, self.tokenizer, self.recipe.lora, self.adapter_base)

    def close(self) -> None:
        if self.copies is not None:
            self.copies.close()
        self.publisher.close()
        self.group.close()
