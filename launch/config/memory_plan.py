"""The memory of a run's processes, and whether the GPUs have it: for `--dry-run`, without torch and without weights."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from ...comm.recipe import Recipe
from ...trainer.memory import (
    CONTEXT_BYTES,
    MemoryEstimate,
    PolicySizes,
    actor_memory,
    reference_memory,
    rollout_memory,
    wants_checkpointing,
)
from ..placement import Placement, visible_devices
from .gpus import Gpus

_GB = 1e9
_VERSIONS_IN_RELAY = 3
_ADVICE = {
    "actor": "more roles.actor, a smaller optimizer.micro_tokens, trainer.activation_checkpointing=true,"
    " optimizer.name=adamw8bit or trainer.offload=true",
    "rollout": "a larger rollout.tp or another generator.gpu_share",
    "reference": "roles.reference=0, which shards it over the trainer's ranks",
}


class MemoryPlan:
    """The needs of the processes at `places`, by the `config` of the policy (the content of `config.json`)."""

    def __init__(self, recipe: Recipe, config: Mapping[str, Any], places: Sequence[Placement], gpus: Gpus) -> None:
        self.sizes = PolicySizes.of(config)
        self.gpus = gpus
        self._recipe = recipe
        self._places = places
        gpu_bytes = gpus.gb * _GB or None
        self.is_checkpointed = wants_checkpointing(self.sizes, recipe, gpu_bytes)
        self.needs: dict[str, MemoryEstimate] = {
            "actor": actor_memory(self.sizes, recipe, checkpointing=self.is_checkpointed),
            "rollout": rollout_memory(self.sizes, recipe, int(config.get("max_position_embeddings", 0))),
        }
        if recipe.roles.reference:
            self.needs["reference"] = reference_memory(self.sizes, recipe)

    @staticmethod
    def micro_tokens(recipe: Recipe, config: Mapping[str, Any], places: Sequence[Placement], gpus: Gpus) -> int:
        """The recipe's `optimizer.micro_tokens`, halved until the memory is enough for it, or doubled as long as it is.

        At most all tokens of a step. Halves are of use down to the longest response, which a micro-batch has to hold in any case;
        `trainer.activation_checkpointing=auto` stays as it is.
        """
        longest = recipe.sampling.max_new_tokens
        most = recipe.batch.prompts_per_step * recipe.batch.samples_per_prompt * longest

        def plan_of(tokens: int) -> tuple[int, bool]:
            optimizer = structs.replace(recipe.optimizer, micro_tokens=tokens)
            plan = MemoryPlan(structs.replace(recipe, optimizer=optimizer), config, places, gpus)
            return len(plan.shortages()), plan.is_checkpointed

        tokens, (least, _) = recipe.optimizer.micro_tokens, plan_of(1)
        while tokens > longest and plan_of(tokens)[0] > least:
            tokens //= 2
        fitting = (least, plan_of(tokens)[1])
        while 2 * tokens <= most and plan_of(2 * tokens) == fitting:
            tokens *= 2
        return tokens

    def lines(self) -> Iterator[str]:
        """A row for each role, then one for GPUs that carry the same roles."""
        size, lora = 2 if self._recipe.model.dtype == "bfloat16" else 4, self._recipe.lora
        total, version = self.sizes.num_parameters, self.sizes.version_bytes(self._recipe)
        yield f"{total:,} parameters, {total * size / _GB:,.3f} GB as {self._recipe.model.dtype}"
        if lora.rank:
            yield f"{self.sizes.adapter_parameters(lora):,} in the adapter: a version has {version / _GB:,.3f} GB"
        for role, need in self.needs.items():
            yield f"{role:10} {need.device_bytes / _GB:9,.3f} GB each: {_parts(need.device)}"
            yield f"{'':10} {need.host_bytes / _GB:9,.3f} GB of host memory: {_parts(need.host)}"
        yield f"{'relay':10} {_VERSIONS_IN_RELAY * version / _GB:9,.3f} GB each: {_VERSIONS_IN_RELAY} versions, and rows on top"
        yield f"activation checkpointing is {'on' if self.is_checkpointed else 'off'}"
        for roles, number in Counter(self._gpu_roles()).items() if self.gpus.gb else ():
            needs = self._on_gpu(roles)
            used = " + ".join(f"{role} {need / _GB:.1f}" for role, need in zip(roles, needs, strict=True))
            total = sum(needs) / _GB
            yield f"{number} GPU{'s' * (number > 1)}: {used} = {total:.1f} of {self.gpus.gb:.1f} GB"

    def shortages(self) -> list[str]:
        """A sentence with the settings to change for each kind of GPU that is too small."""
        found: list[str] = []
        total = self.gpus.gb * _GB
        weights = self.needs["rollout"].device["weights"] + CONTEXT_BYTES
        least_share = total
        for roles in dict.fromkeys(self._gpu_roles()) if total else ():
            needs = self._on_gpu(roles)
            if sum(needs) > total:
                largest = max(zip(needs, roles, strict=True))[1]
                found.append(
                    f"a GPU of {self.gpus.gb:.1f} GB is too small for {' and '.join(roles)}, which need"
                    f" {sum(needs) / _GB:.1f} GB (an estimate): set {_ADVICE[largest]}"
                )
            if "rollout" in roles:
                least_share = min(least_share, self._share(roles))
        if total and weights > least_share:
            found.append(
                f"the weights of a rollout take {weights / _GB:.1f} GB, more than its part of"
                f" generator.gpu_share={self._recipe.generator.gpu_share} of a GPU: set {_ADVICE['rollout']}"
            )
        return found

    def _share(self, roles: Sequence[str]) -> float:
        """Bytes of each process's part of `generator.gpu_share`."""
        return self._recipe.generator.gpu_share * self.gpus.gb * _GB / len(roles)

    def _on_gpu(self, roles: Sequence[str]) -> list[float]:
        """The bytes of each process on a GPU. A rollout fills its part with cache, unless the recipe bounds the cache."""
        fills = self._recipe.generator.kv_gb is None
        return [
            self._share(roles) if role == "rollout" and fills else self.needs[role].device_bytes + CONTEXT_BYTES
            for role in roles
        ]

    def _gpu_roles(self) -> Iterator[tuple[str, ...]]:
        """For each GPU, the roles of the processes on it."""
        found: dict[tuple[int, str], list[str]] = {}
        for place in self._places:
            device = visible_devices(place, self.gpus.names) if place.slot is not None else ""
            if device:
                role = "rollout" if place.role == "shard" else place.role
                found.setdefault((place.host, device), []).append(role)
        return (tuple(roles) for roles in found.values())


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / _GB:.3f}" for name, size in parts.items())
