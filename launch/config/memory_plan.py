"""The memory of a run's processes, and whether GPUs and hosts have it: for `--dry-run`, without torch and without weights.

In a host's memory a process counts with what it holds for itself; shared memory counts once, with the relay that has it, and the
files of the libraries once for each host.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from ...comm.recipe import Recipe
from ...trainer.memory import (
    BYTES,
    CHECKPOINT_PARTS,
    CHUNK_BYTES,
    COPY_PART,
    PROCESS,
    TRANSFORMERS_BYTES,
    MemoryEstimate,
    PolicySizes,
    actor_memory,
    rollout_memory,
    wants_checkpointing,
    wants_one_sum,
)
from ..placement import Placement, actors_partners, visible_devices
from .gpus import Gpus
from .memory_advice import advice
from .prompt_lengths import PromptLength

_GB = 1e9
_CONTEXT_BYTES = 1 << 30
"""CUDA's context, its libraries' workspaces and what the allocator loses to fragmentation."""
_ROW_BYTES = 32
"""Of a token in a relay: ids, log-probabilities, versions, masks and copies of them on their way."""
_TORCH_BYTES = 0.155e9
"""Private memory of a process that has imported the CPU build of torch 2.13, but not transformers; measured, as are those below."""
_LAUNCHER_BYTES = 0.46e9
_SUPERVISOR_BYTES = 0.029e9
_HUB_BYTES = 0.047e9
_STORE_BYTES = 0.026e9
_FRONT_BYTES = TRANSFORMERS_BYTES
"""With the model's tokenizer and no weights."""
_REWARD_BYTES = 0.015e9
"""More if the user's file imports more."""
_REWARD_PROCESSES = 2
_LIBRARIES_BYTES = 0.12e9
_MOST_SLOTS = 128
"""More decode hardly more tokens/s, and the logits of a vocabulary of 150,000 would need more than `_CONTEXT_BYTES` while tokens are drawn."""
_STATES = (
    "weights",
    "gradients",
    "moments",
    "reference policy",
    "critic",
    "weights at the version's start",
    "3 versions",
    PROCESS,
)
"""The parts that a process holds all the time, whatever the data are."""


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
        self.sizes = sizes = PolicySizes.of(config)
        self.gpus = gpus
        self._recipe = recipe
        self._places = places
        self._longest = longest
        self._gpu_roles = _roles_of_gpus(places, gpus)
        fullest = max((len(roles) for roles in self._gpu_roles if "rollout" in roles), default=1)
        self._part = recipe.generator.gpu_share * gpus.gb * _GB / fullest
        """Bytes of each rollout on a GPU: its part of `generator.gpu_share`, where most processes share one; 0 if unknown."""
        room = self._part - _CONTEXT_BYTES if gpus.gb else None
        on_gpu = bool(gpus.names)
        dtype = recipe.model.compute_type
        context = self._context = int(config.get("max_position_embeddings") or 0)
        wanted = recipe.sampling.max_new_tokens
        tokens = context if longest is None else longest.row_tokens(recipe.environment, wanted, context)
        self.row_tokens = tokens
        """Tokens of the longest trajectory."""
        gpu_bytes = gpus.gb * _GB or None
        self.is_checkpointed = wants_checkpointing(sizes, recipe, gpu_bytes)
        beside = max((len(roles) for roles in self._gpu_roles if "actor" in roles), default=1)
        sums_once = wants_one_sum(sizes, recipe, gpu_bytes, beside)
        known = None if longest is None else tokens
        layer = sizes.layer_activations(half=dtype == "bfloat16", trained=True)
        # Versions are in shared memory, which counts here alone; the rows are those of two steps.
        versions = 3.0 * sizes.version_bytes(recipe.lora, dtype)
        rows = 2.0 * recipe.batch.prompts_per_step * recipe.batch.samples_per_prompt * tokens * _ROW_BYTES
        self.needs = {
            "actor": actor_memory(
                sizes,
                recipe,
                checkpointing=self.is_checkpointed,
                on_gpu=on_gpu,
                row_tokens=known,
                keeps_others=actors_partners(0, places) is not None,
                sums_once=sums_once,
            ),
            "rollout": rollout_memory(sizes, recipe, tokens, on_gpu=on_gpu, room=room),
            "relay": MemoryEstimate({}, {"3 versions": versions, "rows": rows, PROCESS: _TORCH_BYTES}),
            "task": MemoryEstimate({}, {PROCESS: _TORCH_BYTES}),
            "reference": MemoryEstimate(  # one layer at a time, without any for a backward pass
                {
                    "weights": 4.0 * sizes.num_parameters,
                    "one layer": recipe.optimizer.micro_batch * layer,
                    "LM head": 2.0 * CHUNK_BYTES,
                },
                {PROCESS: TRANSFORMERS_BYTES},
            ),
        }

    @property
    def slots(self) -> int:
        """`generator.max_running` of a GPU: the number of longest responses in the cache of a rollout, from 1 to `_MOST_SLOTS`.

        Prompts, which come to this, and most responses, which are shorter, are taken to be about equal. A cache that gets full preempts.
        """
        longest = self._recipe.sampling.max_new_tokens
        length = min(longest, self._context or longest)
        each = self.sizes.cache_bytes(length, self._recipe.model.compute_type) / self._recipe.rollout.tp
        return max(1, min(_MOST_SLOTS, int(self.needs["rollout"].device["key-value cache"] / each)))

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
        """A row for each role, for each host, and for GPUs that carry the same roles."""
        dtype = self._recipe.model.compute_type
        lora = self._recipe.lora
        total = self.sizes.num_parameters
        yield f"{total:,} parameters, {total * BYTES[dtype] / _GB:,.3f} GB as {dtype}"
        if lora.rank:
            version = self.sizes.version_bytes(lora, dtype) / _GB
            yield f"{self.sizes.adapter_parameters(lora):,} in the adapter: a version has {version:,.3f} GB"
        known = "no prompt is known: the context" if self._longest is None else f"{self._longest}"
        yield f"{known}; a trajectory has at most {self.row_tokens:,} tokens, a micro-batch {self._recipe.optimizer.micro_batch:,}"
        roles = {_role(place) for place in self._places} - {"task"}
        for role, (device, host) in self.needs.items():
            if role in roles:
                if device and self.gpus.names:
                    yield _row(role, {**device, "CUDA": _CONTEXT_BYTES}, "each:")
                    yield _row("", host, "of host memory:")
                else:
                    yield _row(role, {**device, **host}, "each:")
        for host in self._hosts():
            yield _row("others", self._others(host), f"on host {host}:")
            yield f"{f'host {host}':10} {self._bytes_on(host) / _GB:9,.3f} GB of its memory are needed at most"
        yield f"activation checkpointing is {'on' if self.is_checkpointed else 'off'}"
        for roles, number in self._gpu_roles.items() if self.gpus.gb else ():
            needs = [self.needs[role].device_bytes + _CONTEXT_BYTES for role in roles]
            used = " + ".join(f"{role} {need / _GB:.1f}" for role, need in zip(roles, needs, strict=True))
            yield f"{number} GPU{'s' * (number > 1)}: {used} = {sum(needs) / _GB:.1f} of {self.gpus.gb:.1f} GB"

    def shortages(self) -> list[str]:
        """A sentence with the settings to change for each kind of GPU that is too small."""
        if not self.gpus.gb:
            return []
        found: list[str] = []
        for roles in self._gpu_roles:
            needs = [self.needs[role].device_bytes + _CONTEXT_BYTES for role in roles]
            if sum(needs) > self.gpus.gb * _GB:
                largest = max(zip(needs, roles, strict=True))[1]
                found.append(
                    f"a GPU of {self.gpus.gb:.1f} GB is too small for {' and '.join(roles)}, which {'need' if len(roles) > 1 else 'needs'}"
                    f" {sum(needs) / _GB:.1f} GB (an estimate): set {advice(largest, on_gpu=True)}"
                )
        weights = self.needs["rollout"].device["weights"] + _CONTEXT_BYTES
        if weights > self._part:
            found.append(
                f"the weights of a rollout take {weights / _GB:.1f} GB, more than its part of"
                f" generator.gpu_share={self._recipe.generator.gpu_share} of a GPU: set {advice('rollout', on_gpu=True)}"
            )
        return found

    def host_shortages(self, host_bytes: float, free_bytes: float) -> tuple[list[str], list[str]]:
        """A sentence for each host that has too little memory for what its processes hold all the time, whatever the data are; and for each
        whose processes may need more than it has, or than other programs leave of it now. Emulated devices need none.
        """
        refused: list[str] = []
        warnings: list[str] = []
        for host in [] if self._recipe.is_emulated else self._hosts():
            here = [place for place in self._places if place.host == host]
            copies = sum(self._bytes_of(place, [COPY_PART]) for place in here)
            need = self._bytes_on(host) - copies
            least = sum(self._bytes_of(place, _STATES) for place in here)
            written = sum(self._bytes_of(place, CHECKPOINT_PARTS) for place in here)
            largest = max(here, key=self._bytes_of)
            change = f"set {advice(largest.role, on_gpu=False) or 'fewer roles here'}, or take a larger host"
            each = f"{largest.name} alone {self._bytes_of(largest) / _GB:.1f} GB"
            has = f"host {host} has {host_bytes / _GB:.1f} GB of memory, {free_bytes / _GB:.1f} GB of it free now"
            if least > host_bytes:
                needs = f"the weights and states of its processes alone need {least / _GB:.1f} GB ({each})"
                refused.append(f"{has}, and {needs}: {change}")
            elif need > min(host_bytes, free_bytes):
                needs = f"its processes need {need / _GB:.1f} GB (an estimate; {each})"
                needs += f", {written / _GB:.1f} GB of them for the copy of a checkpoint"
                end = "end other programs, or " if need <= host_bytes else ""
                warnings.append(f"{has}, and {needs}: {end}{change}")
            elif need + copies > min(host_bytes, free_bytes):
                needs = f"its processes need {need / _GB:.1f} GB (an estimate)"
                without = "without, a trainer that dies trains the steps since its last checkpoint again"
                warnings.append(f"{has}, and {needs} and {copies / _GB:.1f} GB for more copies of the state: {without}")
        return refused, warnings

    def of_processes(self) -> dict[str, float]:
        """The bytes of each role's process in its host's memory, by its name."""
        return {place.name: self._bytes_of(place) for place in self._places}

    def _bytes_of(self, place: Placement, parts: Collection[str] | None = None) -> float:
        """Bytes of a process in its host's memory; of these parts alone, where they are given."""
        need = self.needs[_role(place)]
        on_gpu = self.gpus.names and place.slot is not None
        held = dict(need.host) if on_gpu else {**need.device, **need.host}
        if place.role == "actor" and place.index:
            del held[CHECKPOINT_PARTS[1]]
        return sum(size for name, size in held.items() if parts is None or name in parts)

    def _others(self, host: int) -> dict[str, float]:
        """The processes of a host without a role in the recipe."""
        here = [place for place in self._places if place.host == host]
        has_hub = any(place.name == "relay-0" for place in here)
        return {
            "launcher": _LAUNCHER_BYTES,
            "supervisors": _SUPERVISOR_BYTES * len(here),
            "hub": _HUB_BYTES * has_hub,
            **({"front": _FRONT_BYTES} if has_hub and self._recipe.rollout.serve else {}),
            "store": _STORE_BYTES * any(place.name == "actor-0" for place in here),
            "rewards": _REWARD_BYTES * _REWARD_PROCESSES * sum(place.role == "rollout" for place in here),
            "libraries": _LIBRARIES_BYTES,
        }

    def _bytes_on(self, host: int) -> float:
        """Bytes of all processes of a host."""
        roles = sum(self._bytes_of(place) for place in self._places if place.host == host)
        return roles + sum(self._others(host).values())

    def _hosts(self) -> list[int]:
        return sorted({place.host for place in self._places})


def _roles_of_gpus(places: Sequence[Placement], gpus: Gpus) -> Counter[tuple[str, ...]]:
    """The number of GPUs whose processes have the same roles, by these."""
    found: defaultdict[tuple[int, str], list[str]] = defaultdict(list)
    for place in places:
        if place.slot is not None and gpus.names:
            found[place.host, visible_devices(place, gpus.names)].append(_role(place))
    return Counter(map(tuple, found.values()))


def _role(place: Placement) -> str:
    return "rollout" if place.role == "shard" else place.role


def _row(name: str, parts: Mapping[str, float], whose: str) -> str:
    listed = ", ".join(f"{part} {size / _GB:.3f}" for part, size in parts.items())
    return f"{name:10} {sum(parts.values()) / _GB:9,.3f} GB {whose} {listed}"
