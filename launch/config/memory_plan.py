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
    PromptLength,
    actor_memory,
    reference_memory,
    relay_memory,
    rollout_memory,
    wants_checkpointing,
)
from ..placement import Placement, visible_devices
from .gpus import Gpus
from .host_plan import HostPlan, HostShortage
from .memory_advice import advice

_GB = 1e9
_HOST_MICRO_TOKENS = 2048
"""`optimizer.micro_tokens` of a host without a GPU: more cost much memory there and gain little time (docs/develop/log.md)."""


def with_micro_tokens(recipe: Recipe, gpus: Gpus) -> Recipe:
    """The recipe with its `optimizer.micro_tokens`, which depends on whether the trainer has GPUs."""
    if recipe.optimizer.micro_tokens is not None or recipe.trainer.engine == "emulated" or gpus.names:
        return recipe
    return structs.replace(recipe, optimizer=structs.replace(recipe.optimizer, micro_tokens=_HOST_MICRO_TOKENS))


class MemoryPlan:
    """The needs of the processes at `places`, by the `config` of the policy (the content of `config.json`).

    Without the longest prompt of the data, or with none that is known, a trajectory may fill the policy's whole context.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: Mapping[str, Any],
        places: Sequence[Placement],
        gpus: Gpus,
        longest: PromptLength | None = None,
    ) -> None:
        self.sizes = PolicySizes.of(config)
        self.gpus = gpus
        self._recipe = recipe
        self._places = places
        gpu_bytes = gpus.gb * _GB or None
        context = int(config.get("max_position_embeddings") or 0)
        self.row_tokens = context if longest is None else longest.row_tokens(recipe, context)
        """Tokens of the longest trajectory."""
        self._longest = longest
        self.is_checkpointed = wants_checkpointing(self.sizes, recipe, gpu_bytes)
        self.needs: dict[str, MemoryEstimate] = {
            "actor": actor_memory(
                self.sizes,
                recipe,
                checkpointing=self.is_checkpointed,
                on_gpu=bool(gpus.names),
                row_tokens=None if longest is None else self.row_tokens,
            ),
            "rollout": rollout_memory(self.sizes, recipe, self.row_tokens, on_gpu=bool(gpus.names)),
            "relay": relay_memory(self.sizes, recipe, self.row_tokens),
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

        tokens = recipe.optimizer.micro_batch
        least, _ = plan_of(1)
        while tokens > longest and plan_of(tokens)[0] > least:
            tokens //= 2
        fitting = (least, plan_of(tokens)[1])
        while 2 * tokens <= most and plan_of(2 * tokens) == fitting:
            tokens *= 2
        return tokens

    def lines(self) -> Iterator[str]:
        """A row for each role, then one for GPUs that carry the same roles."""
        size = 2 if self._recipe.model.dtype == "bfloat16" else 4
        lora = self._recipe.lora
        total = self.sizes.num_parameters
        version = self.sizes.version_bytes(self._recipe)
        yield f"{total:,} parameters, {total * size / _GB:,.3f} GB as {self._recipe.model.dtype}"
        if lora.rank:
            yield f"{self.sizes.adapter_parameters(lora):,} in the adapter: a version has {version / _GB:,.3f} GB"
        known = "no prompt is known: the context" if self._longest is None else f"{self._longest}"
        yield f"{known}; a trajectory has at most {self.row_tokens:,} tokens, a micro-batch {self._recipe.optimizer.micro_batch:,}"
        for role, need in self.needs.items():
            if not need.device or not self.gpus.names:
                parts = {**need.device, **need.host}
                yield f"{role:10} {sum(parts.values()) / _GB:9,.3f} GB each: {_parts(parts)}"
                continue
            device = self._filled(need.device) if role == "rollout" else need.device
            yield f"{role:10} {sum(device.values()) / _GB:9,.3f} GB each: {_parts(device)}"
            yield f"{'':10} {need.host_bytes / _GB:9,.3f} GB of host memory: {_parts(need.host)}"
        for host in self.hosts():
            others = host.others()
            yield f"{'others':10} {sum(others.values()) / _GB:9,.3f} GB on host {host.host}: {_parts(others)}"
            yield f"{f'host {host.host}':10} {host.num_bytes / _GB:9,.3f} GB of its memory are needed at most"
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
                    f"a GPU of {self.gpus.gb:.1f} GB is too small for {' and '.join(roles)}, which {'need' if len(roles) > 1 else 'needs'}"
                    f" {sum(needs) / _GB:.1f} GB (an estimate): set {advice(largest, on_gpu=True)}"
                )
            if "rollout" in roles:
                least_share = min(least_share, self._share(roles))
        if total and weights > least_share:
            found.append(
                f"the weights of a rollout take {weights / _GB:.1f} GB, more than its part of"
                f" generator.gpu_share={self._recipe.generator.gpu_share} of a GPU: set {advice('rollout', on_gpu=True)}"
            )
        return found

    def hosts(self) -> list[HostPlan]:
        """The memory of each host."""
        on_gpu = self.needs.keys() - {"relay"} if self.gpus.names else ()
        numbers = sorted({place.host for place in self._places})
        return [HostPlan(number, self._recipe, self._places, self.needs, on_gpu) for number in numbers]

    def host_shortages(self, host_bytes: float, free_bytes: float | None = None) -> list[HostShortage]:
        """A sentence for each host whose processes need more than the memory of a host, that for the copy of a checkpoint included."""
        return [shortage for host in self.hosts() for shortage in host.shortages(host_bytes, free_bytes)]

    def of_processes(self) -> dict[str, float]:
        """The bytes of each role's process in its host's memory, by its name."""
        plans = {plan.host: plan for plan in self.hosts()}
        return {place.name: plans[place.host].bytes_of(place) for place in self._places}

    def _filled(self, need: Mapping[str, float]) -> Mapping[str, float]:
        """The memory that a rollout takes on a GPU: its whole share, with the cache in all that the weights leave.

        Returns `need` itself without a GPU, if the recipe bounds the cache, or if the share is too small.
        """
        shares = [self._share(roles) for roles in self._gpu_roles() if "rollout" in roles]
        rest = min(shares, default=0.0) - need["weights"] - CONTEXT_BYTES
        if not self.gpus.gb or self._recipe.generator.kv_gb is not None or rest <= 0:
            return need
        return {"weights": need["weights"], "key-value cache": rest, "CUDA": CONTEXT_BYTES}

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
