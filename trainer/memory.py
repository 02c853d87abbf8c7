"""How much memory a rank of the trainer needs: arithmetic on `config.json` and the recipe. Imports no torch.

Counted are the peak of a micro-batch after the first one of a step, and of the update; all figures are in bytes. A tensor that
autograd keeps counts once, however many operations share it. Tests hold the sum to the memory of a small policy that trains.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..comm.errors import SettingError
from ..comm.recipe import LoraSettings, Recipe
from .policy.families import FAMILIES, Family

CHUNK_BYTES = 512 << 20
"""One chunk of logits on a GPU (`policy.head`)."""
HOST_CHUNK_BYTES = 4 << 20
"""One chunk of logits on a host without a GPU."""
PROCESS = "process"
"""The part of host memory that a process takes before it holds anything: Python, torch, and in trainer and rollout transformers."""
TORCH_BYTES = 0.155e9
"""Private memory of a process that has imported the CPU build of torch; the pages of library files are shared."""
TRANSFORMERS_BYTES = 0.265e9
"""The same for a process that has imported transformers too."""
_HOLES = 0.4
"""Of what comes and goes, the share that the C library's heap takes beside it after some thirty steps; measured, without a GPU."""
_PAGE_TOKENS = 64
"""Tokens of a page of the cache on a host without a GPU."""
_KEPT_BYTES = 1 << 30
"""The most that the cache keeps there for prompts that come again (`rollout.engine.memory`)."""
CONTEXT_BYTES = 1 << 30
"""CUDA's context, its libraries' workspaces and what the allocator loses to fragmentation."""
CHECKPOINT_PARTS = ("copy for a checkpoint", "policy for its export")
"""The parts of host memory that a checkpoint needs while it is written; the second part on rank 0 alone."""
CHECKPOINTING_FROM = 0.5
"""`trainer.activation_checkpointing=auto` checkpoints where the rest needs more than this share of a GPU."""
_MOMENTS = {"adamw": 8, "adamw8bit": 2}
_VERSIONS_IN_RELAY = 3
_LOGITS = 12
"""Matrices of logits of all running trajectories while tokens are drawn, the largest number at a time."""
_ROW_BYTES = 32
"""Of a token in a relay: ids, log-probabilities, versions, masks and copies of them on their way."""


@dataclass(frozen=True, slots=True)
class PolicySizes:
    """The widths of a policy, in elements; `query`, `key_value` and `mlp` are of one token in one layer."""

    num_layers: int
    layer_parameters: int
    other_parameters: int
    """Embedding, LM head and last norm, a tied matrix once."""
    hidden: int
    query: int
    key_value: int
    """Keys and values together."""
    mlp: int
    """Of a mixture of experts, those that a token passes."""
    routed: int
    """Copies of a token for the experts that it passes; 0 without experts."""
    norms: int
    """Elements per token that the norms of one layer normalise."""
    vocab: int
    linear: Mapping[str, tuple[int, int]]
    """Inputs and outputs of one layer's linear modules, by their names; experts are not among them."""

    @property
    def num_parameters(self) -> int:
        return self.num_layers * self.layer_parameters + self.other_parameters

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "PolicySizes":
        """From what `config.json` holds of a decoder-only model with gated MLPs; raises SettingError if it lacks a size."""
        try:
            return cls._of(config)
        except KeyError as error:
            raise SettingError(f"model.path: config.json has no {error.args[0]}") from None

    @classmethod
    def _of(cls, config: Mapping[str, Any]) -> "PolicySizes":
        family = FAMILIES.get(config["model_type"], Family())
        hidden = int(config["hidden_size"])
        layers = int(config["num_hidden_layers"])
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        query = heads * head_dim
        key_value = 2 * (config.get("num_key_value_heads") or heads) * head_dim
        experts = config.get("num_local_experts") or config.get("num_experts") or 1
        passed = (config.get("num_experts_per_tok") or 1) if experts > 1 else 1
        width = (config.get("moe_intermediate_size") if experts > 1 else None) or config["intermediate_size"]
        shared = (config.get("shared_expert_intermediate_size") or 0) if experts > 1 else 0
        matrices = hidden * (2 * query + key_value) + 3 * hidden * (experts * width + shared)
        biases = query + key_value if family.has_biases or config.get("attention_bias") else 0
        norms = hidden * family.num_norms
        is_tied = config.get("tie_word_embeddings", family.is_tied)
        return cls(
            num_layers=layers,
            layer_parameters=matrices + biases + norms + (hidden * experts if experts > 1 else 0),
            other_parameters=config["vocab_size"] * hidden * (1 if is_tied else 2) + hidden,
            hidden=hidden,
            query=query,
            key_value=key_value,
            mlp=passed * width + shared,
            routed=3 * passed * hidden if experts > 1 else 0,
            norms=norms + (query + key_value // 2 if family.has_head_norms else 0),
            vocab=config["vocab_size"],
            linear=_linear(family, hidden, query, key_value // 2, shared if experts > 1 else width),
        )

    def adapted(self, lora: LoraSettings) -> dict[str, tuple[int, int]]:
        """Those of `linear` that have an adapter."""
        wanted = (lora.targets,) if isinstance(lora.targets, str) else lora.targets
        names = {target.rpartition(".")[2] for target in wanted}
        return {name: shape for name, shape in self.linear.items() if lora.targets == "all-linear" or name in names}

    def adapter_parameters(self, lora: LoraSettings) -> int:
        """Parameters of the adapter of all layers; 0 without one."""
        return self.num_layers * sum(lora.rank * (wide + high) for wide, high in self.adapted(lora).values())

    def version_bytes(self, recipe: Recipe) -> int:
        """Bytes of one version of the weights: of the adapter alone, if there is one, in fp32."""
        if recipe.lora.rank:
            return 4 * self.adapter_parameters(recipe.lora)
        return self.num_parameters * _size(recipe)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
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
class PromptLength:
    """Tokens of the longest prompt that was found, in `num_prompts` of them."""

    tokens: int
    num_prompts: int

    def __str__(self) -> str:
        return f"the longest of {self.num_prompts:,} prompts has {self.tokens:,} tokens"

    def row_tokens(self, recipe: Recipe, context: int) -> int:
        """Tokens of the longest trajectory: prompt and response, at most the `context` (0 is not bounded).

        Answers of tools and environments count in the response. But an environment may add to the prompt itself at its reset, and
        only the context bounds that.
        """
        if recipe.environment.path and context:
            return context
        longest = self.tokens + recipe.sampling.max_new_tokens
        return min(longest, context) if context else longest


def actor_memory(
    sizes: PolicySizes,
    recipe: Recipe,
    *,
    checkpointing: bool,
    on_gpu: bool = True,
    row_tokens: int | None = None,
    chunk: int | None = None,
) -> MemoryEstimate:
    """Of one rank of the trainer.

    row_tokens: tokens of the longest trajectory, where the data are known. chunk: bytes of one chunk of logits.
    """
    actors = recipe.roles.actor
    ranks = recipe.trainer.shard_ranks or actors
    lora = recipe.lora
    moments = _MOMENTS[recipe.optimizer.name]
    adapted = [wide * high for wide, high in sizes.adapted(lora).values()] if lora.rank else []
    # Below an adapter, weights are in the type that the rollouts have, and nothing else of them is kept.
    base = (4 * sizes.num_parameters - (4 - _size(recipe)) * sizes.num_layers * sum(adapted)) / ranks
    share = (sizes.adapter_parameters(lora) if lora.rank else sizes.num_parameters) / ranks
    weights = base + 4 * share if lora.rank else 4 * share
    states: dict[str, float] = {"weights": weights, "gradients": 4 * share, "moments": moments * share}
    if recipe.algorithm.kl_coef > 0 and not recipe.roles.reference and not lora.rank:
        states["reference policy"] = 4 * share
    if recipe.algorithm.advantage == "gae":
        states["critic"] = weights + (4 + moments) * share  # its head has one row instead of the vocabulary
    if recipe.batch.updates_per_version > 1 and recipe.algorithm.proximal == "version":
        states["weights of the version's start"] = 4 * share
    chunk = chunk or (CHUNK_BYTES if on_gpu else HOST_CHUNK_BYTES)
    work = _work(sizes, recipe, checkpointing=checkpointing, on_gpu=on_gpu, row_tokens=row_tokens, chunk=chunk)
    published = sizes.version_bytes(recipe) / actors
    kept = (4 + moments) * share
    host = {
        # Steps without a GPU are so long that a version has left before the next one.
        "published weights": published * (2 if on_gpu else 1),
        CHECKPOINT_PARTS[0]: kept,
        # Of rank 0, where the copy for the checkpoint does not have it whole.
        CHECKPOINT_PARTS[1]: 4.0 * sizes.num_parameters if _is_sharded(recipe) or lora.rank else 0.0,
        PROCESS: TRANSFORMERS_BYTES,
    }
    if recipe.trainer.offload:
        return MemoryEstimate(work, states | host)
    return MemoryEstimate(states | work, host)


def _work(
    sizes: PolicySizes, recipe: Recipe, *, checkpointing: bool, on_gpu: bool, row_tokens: int | None, chunk: int
) -> dict[str, float]:
    """Of one rank of the trainer: what a micro-batch takes beside the states."""
    is_half = recipe.model.dtype == "bfloat16"
    is_sharded = _is_sharded(recipe)
    lora = recipe.lora
    adapted = [wide * high for wide, high in sizes.adapted(lora).values()] if lora.rank else []
    work: dict[str, float] = {}
    if is_sharded:
        # The rest of the policy stays gathered, of the layers the present one and the next; each has a gradient to reduce.
        gradients = 0 if lora.rank else 4
        work["gathered weights"] = (4 + gradients) * sizes.other_parameters + (8 + gradients) * sizes.layer_parameters
    if is_half:
        copies = 1 if checkpointing else sizes.num_layers
        work["bfloat16 copies"] = 2 * copies * (sizes.layer_parameters - sum(adapted))
    if adapted:
        work["merged weight"] = (8 if is_half else 4) * max(adapted)
    tokens = _micro_batch_tokens(recipe, row_tokens)
    work["activations"] = tokens * _activations(sizes, half=is_half, checkpointing=checkpointing, trained=not lora.rank)
    work["LM head"] = _head(sizes, chunk, half=is_half, trained=not lora.rank)
    if is_half and not on_gpu:
        work["LM head"] += 4 * sizes.vocab * sizes.hidden  # a CPU multiplies in fp32
    if not on_gpu:
        work["holes of the heap"] = _HOLES * sum(work.values())
    return work


def _is_sharded(recipe: Recipe) -> bool:
    return recipe.roles.actor > 1 or recipe.trainer.offload


def reference_memory(sizes: PolicySizes, recipe: Recipe) -> MemoryEstimate:
    """Of one reference rank: the whole policy, and one layer's activations without any for a backward pass."""
    half = recipe.model.dtype == "bfloat16"
    layer = recipe.optimizer.micro_batch * _layer_activations(sizes, half=half, trained=True)
    return MemoryEstimate(
        {"weights": 4.0 * sizes.num_parameters, "one layer": layer, "LM head": 2.0 * CHUNK_BYTES},
        {PROCESS: TRANSFORMERS_BYTES},
    )


def least_cache_bytes(sizes: PolicySizes, recipe: Recipe, context: int) -> float:
    """The smallest key-value cache of a rollout: one sequence of the policy's whole context, with the two pages that a fork needs more."""
    pages = -(-context // _PAGE_TOKENS) + 2
    return pages * _PAGE_TOKENS * sizes.num_layers * sizes.key_value * _size(recipe) / recipe.rollout.tp


def rollout_memory(sizes: PolicySizes, recipe: Recipe, row_tokens: int, *, on_gpu: bool = True) -> MemoryEstimate:
    """Of one rank of a replica: its slice of the weights, and a cache in which all running trajectories may be longest.

    row_tokens: tokens of the longest trajectory. Without a GPU a page takes memory from its first use on, and pages of ended
    trajectories are kept for their prompts.
    """
    size = _size(recipe)
    tp = recipe.rollout.tp
    weights = (sizes.num_layers * sizes.layer_parameters / tp + sizes.other_parameters) * size
    token_bytes = sizes.num_layers * sizes.key_value * size / tp
    row = -(-row_tokens // _PAGE_TOKENS) * _PAGE_TOKENS * token_bytes
    cache = recipe.generator.max_running * row
    if not on_gpu:
        rows = recipe.batch.prompts_per_step * recipe.batch.samples_per_prompt / max(1, recipe.num_replicas)
        # Pages that are kept make room for running ones, each in a range of its own.
        cache += cache + min(_KEPT_BYTES, rows * row)
    if recipe.generator.kv_gb is not None:
        cache = recipe.generator.kv_gb * 1e9 if on_gpu else min(cache, recipe.generator.kv_gb * 1e9)
    device = {"weights": weights, "key-value cache": cache}
    host = {PROCESS: TRANSFORMERS_BYTES}
    if recipe.lora.rank:
        adapted = sum(wide * high for wide, high in sizes.adapted(recipe.lora).values())
        base = sizes.num_layers * adapted * size / tp
        host = {"received version": float(sizes.version_bytes(recipe)), "weights below the adapter": base} | host
    elif on_gpu:
        host = {"received version": weights} | host
    if not on_gpu:
        prefill = 4.0 * recipe.generator.prefill_tokens * (16 * sizes.hidden + 12 * sizes.mlp)
        head = sizes.vocab * (_LOGITS * recipe.generator.max_running + (sizes.hidden if size == 2 else 0))
        work = {"prefill": prefill, "LM head": 4.0 * head}  # a CPU multiplies in fp32
        device |= work | {"holes of the heap": _HOLES * sum(work.values())}
    return MemoryEstimate(device, host)


def relay_memory(sizes: PolicySizes, recipe: Recipe, row_tokens: int) -> MemoryEstimate:
    """Of a relay: three versions in shared memory, which count here alone, and the rows of two steps."""
    rows = 2.0 * recipe.batch.prompts_per_step * recipe.batch.samples_per_prompt * row_tokens * _ROW_BYTES
    versions = float(_VERSIONS_IN_RELAY * sizes.version_bytes(recipe))
    return MemoryEstimate({}, {"3 versions": versions, "rows": rows, PROCESS: TORCH_BYTES})


def wants_checkpointing(sizes: PolicySizes, recipe: Recipe, gpu_bytes: float | None) -> bool:
    """What `trainer.activation_checkpointing` means on a GPU of this size, or without one."""
    setting = recipe.trainer.activation_checkpointing
    if setting != "auto" or gpu_bytes is None or recipe.generator.exact:
        return setting is True
    return actor_memory(sizes, recipe, checkpointing=False).device_bytes > CHECKPOINTING_FROM * gpu_bytes


def _micro_batch_tokens(recipe: Recipe, row_tokens: int | None) -> int:
    """Most tokens of a micro-batch: a trajectory is never cut, and a rank has at most its part of a step."""
    longest = row_tokens or recipe.sampling.max_new_tokens
    tokens = recipe.optimizer.micro_batch
    if row_tokens:
        rows = recipe.batch.prompts_per_step * recipe.batch.samples_per_prompt
        tokens = min(tokens, -(-rows * row_tokens // recipe.roles.actor))
    return max(tokens, longest)


def _size(recipe: Recipe) -> int:
    """Bytes of one weight of a rollout."""
    return 2 if recipe.model.dtype == "bfloat16" else 4


def _linear(family: Family, hidden: int, query: int, key: int, mlp: int) -> dict[str, tuple[int, int]]:
    """`PolicySizes.linear`; `mlp` is 0 where all of it is experts."""
    if family.is_fused:
        inputs = {"qkv_proj": (hidden, query + 2 * key)}
        gates = {"gate_up_proj": (hidden, 2 * mlp)}
    else:
        inputs = {"q_proj": (hidden, query), "k_proj": (hidden, key), "v_proj": (hidden, key)}
        gates = {"gate_proj": (hidden, mlp), "up_proj": (hidden, mlp)}
    return inputs | {"o_proj": (query, hidden)} | (gates | {"down_proj": (mlp, hidden)} if mlp else {})


def _activations(sizes: PolicySizes, *, half: bool, checkpointing: bool, trained: bool) -> float:
    """Per token: what is kept for the backward pass, and the last layer's output and norm."""
    layer = _layer_activations(sizes, half=half, trained=trained)
    last = 4 * 5 * sizes.hidden
    if checkpointing:
        return 4 * sizes.num_layers * sizes.hidden + layer + last
    return sizes.num_layers * layer + last


def _layer_activations(sizes: PolicySizes, *, half: bool, trained: bool) -> float:
    """Per token of one layer.

    A norm keeps its input and, where its weight is `trained`, the normalised one, in fp32. A linear layer keeps its input: in fp32 the one that layers share, in
    autocast a copy each (query, key, value; gate, up). Attention keeps query, key, value and output; a gated MLP the gate, its
    activation, the other factor and the product. Experts compute in fp32.
    """
    inputs = 2 * 5 * sizes.hidden if half else 4 * 2 * sizes.hidden
    size = 2 if half else 4
    attention = size * (2 * sizes.query + sizes.key_value)
    mlp = (4 if sizes.routed else size) * 4 * sizes.mlp
    norms = (8 if trained else 4) * sizes.norms
    return norms + inputs + attention + mlp + 4 * sizes.routed


def _head(sizes: PolicySizes, chunk: int, *, half: bool, trained: bool) -> float:
    """Two chunks of logits, the weight's gradient, and for bfloat16 a copy of the weight and a product to add."""
    gradient = 4 + (4 if half else 0) if trained else 0
    return 2 * max(chunk, 4 * 128 * sizes.vocab) + sizes.vocab * sizes.hidden * (gradient + (2 if half else 0))
