"""The memory estimate: its arithmetic agrees with what a small policy really takes while it trains."""

import json
import weakref
from typing import Any, Literal

import numpy as np
import pytest
import torch
from support.policies import FAMILIES, tiny_policy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.comm.recipe import (
    AlgorithmSettings,
    BatchSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    Recipe,
    RoleSettings,
    SamplingSettings,
    TrainerSettings,
)
from headrace.trainer import memory
from headrace.trainer.batch import Trajectory, pack
from headrace.trainer.learners.optimizer import open_optimizer
from headrace.trainer.logprobs import packed_logprobs
from headrace.trainer.memory import PolicySizes, actor_memory, wants_checkpointing
from headrace.trainer.policy import lm_head
from headrace.trainer.policy.lora import adapter_shapes, add_adapter, target_layers
from headrace.trainer.policy.model import load_policy

QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that exist, and the most that existed at one time."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = set()

    def hold(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.known:
            self.known.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.release, key, storage.nbytes())

    def release(self, key, size):
        self.known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.hold(leaf)
        return out


def peak_of_training(path, recipe):
    """The peak of the third micro-batch, after an update, with weights and moments."""
    base = getattr(torch, recipe.model.compute_type)
    policy = load_policy(path, shard=lambda p: add_adapter(p.model, recipe.lora, 0, base) if recipe.lora.rank else None)
    if recipe.trainer.activation_checkpointing is True:
        policy.checkpoint_activations()
    optimizer = open_optimizer(policy, recipe.optimizer)
    length = 64
    ids, zeros = np.arange(length) % 90, np.zeros(length - 1, np.float32)
    rows = [
        Trajectory(ids[:1], ids[1:], zeros, np.ones(length - 1, np.uint8), 0, zeros)
        for _ in range(recipe.optimizer.micro_tokens // length)
    ]
    batch = pack(rows, 0, torch.device("cpu"))

    def backward():
        logprobs, _ = packed_logprobs(policy, batch, recipe)
        logprobs.mean().backward()

    backward()
    optimizer.step()
    live = LiveBytes()
    for parameter in policy.parameters():
        for tensor in (parameter, parameter.grad, *optimizer.state[parameter].values()):
            if tensor is not None:
                live.hold(tensor)
    with live:
        backward()
    return live.peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("family", "changes", "rank"),
    [
        ("llama", {"tie_word_embeddings": False}, 0),
        ("qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 6, "vocab_size": 2000}, 0),
        ("gemma3_text", {"num_hidden_layers": 6}, 0),
        ("mixtral", {}, 0),
        ("qwen3_5_text", {"linear_key_head_dim": 32, "linear_value_head_dim": 32}, 0),
        ("qwen3_5_text", {"linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 32}, 8),
        ("llama", {"tie_word_embeddings": False, "num_hidden_layers": 6}, 8),
    ],
)
def test_the_estimate_is_within_15_percent_of_a_policy_that_trains(
    tmp_path, monkeypatch, family, changes, rank, checkpointing, dtype
):
    wide = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "head_dim": 32}
    path = tiny_policy(tmp_path, family, **(wide | {"num_hidden_layers": 4} | changes))
    chunk = 1 << 18
    monkeypatch.setitem(lm_head._CHUNK_BYTES, "cpu", chunk)
    monkeypatch.setattr(memory, "CHUNK_BYTES", chunk)
    recipe = Recipe(
        model=ModelSettings(dtype=dtype),
        lora=LoraSettings(rank=rank),
        optimizer=OptimizerSettings(micro_tokens=2048),
        sampling=SamplingSettings(max_new_tokens=64),
        trainer=TrainerSettings(activation_checkpointing=checkpointing),
    )
    sizes = PolicySizes.of(json.loads((path / "config.json").read_text()))
    estimate = actor_memory(sizes, recipe, checkpointing=checkpointing)
    assert estimate.device_bytes == pytest.approx(peak_of_training(path, recipe), rel=0.15), estimate.device


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_without_a_gpu_the_estimate_of_a_large_vocabulary_is_within_15_percent(tmp_path, is_tied, dtype):
    path = tiny_policy(tmp_path, "qwen3", hidden_size=128, vocab_size=60_000, tie_word_embeddings=is_tied)
    recipe = Recipe(
        model=ModelSettings(dtype=dtype),
        optimizer=OptimizerSettings(micro_tokens=2048),
        sampling=SamplingSettings(max_new_tokens=64),
        trainer=TrainerSettings(activation_checkpointing=False),
    )
    sizes = PolicySizes.of(json.loads((path / "config.json").read_text()))
    parts = dict(actor_memory(sizes, recipe, checkpointing=False, on_gpu=False).device)
    parts.pop("heap fragmentation")  # of the C library, not of tensors
    assert sum(parts.values()) == pytest.approx(peak_of_training(path, recipe), rel=0.15), parts


@pytest.mark.parametrize("family", [*FAMILIES])
def test_the_number_of_parameters_follows_from_the_configuration(tmp_path, family):
    path = tiny_policy(tmp_path, family)
    sizes = PolicySizes.of(json.loads((path / "config.json").read_text()))
    counted = sum(parameter.numel() for parameter in load_policy(path, weights=False).parameters())
    assert sizes.num_parameters == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize(
    ("family", "targets"),
    [(family, "all-linear") for family in ("llama", "phi3", "qwen2_moe", "gpt_oss")]
    + [("llama", ("self_attn.q_proj", "down_proj")), ("phi3", "gate_up_proj")],
)
def test_the_parameters_of_an_adapter_follow_from_the_configuration(tmp_path, family, targets):
    path, lora = tiny_policy(tmp_path, family), LoraSettings(rank=4, targets=targets)
    sizes = PolicySizes.of(json.loads((path / "config.json").read_text()))
    shapes = adapter_shapes(target_layers(load_policy(path, weights=False).model, targets), 4)
    counted = sum(shape.numel() for shape in shapes.values())
    assert sizes.adapter_parameters(lora) == pytest.approx(counted, rel=0.1)
    assert sizes.version_bytes(lora, "float32") == 4 * sizes.adapter_parameters(lora)


def test_an_adapter_of_half_a_billion_parameters_is_less_than_2_percent_of_them():
    sizes = PolicySizes.of(
        {
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        }
    )
    whole, adapter = (sizes.version_bytes(LoraSettings(rank=rank), "bfloat16") for rank in (0, 8))
    assert whole == pytest.approx(988e6, rel=0.01) and adapter == pytest.approx(17.6e6, rel=0.01)
    assert adapter / whole < 0.02


def test_below_an_adapter_no_gradient_moment_or_reference_is_counted():
    sizes = PolicySizes.of(QWEN_7B)
    settings = {"model": ModelSettings(dtype="bfloat16"), "algorithm": AlgorithmSettings(kl_coef=0.1)}
    need = actor_memory(sizes, Recipe(lora=LoraSettings(rank=8), **settings), checkpointing=True)
    small = 4 * sizes.adapter_parameters(LoraSettings(rank=8))
    assert need.device["gradients"] == small and need.device["moments"] == 2 * small
    assert "reference policy" not in need.device
    assert 2 < need.device["weights"] / sizes.num_parameters < 2.4
    assert need.device_bytes < 0.3 * actor_memory(sizes, Recipe(**settings), checkpointing=True).device_bytes


def test_a_policy_of_7_billion_parameters_is_checkpointed_on_80_gb_and_a_small_one_is_not():
    sizes = PolicySizes.of(QWEN_7B)
    assert sizes.num_parameters == pytest.approx(7.616e9, rel=1e-3)
    recipe = Recipe(model=ModelSettings(dtype="bfloat16"), roles=RoleSettings(actor=4))
    assert wants_checkpointing(sizes, recipe, 80e9) and not wants_checkpointing(sizes, recipe, None)
    tiny = PolicySizes.of(QWEN_7B | {"hidden_size": 128, "intermediate_size": 352, "vocab_size": 512})
    assert not wants_checkpointing(tiny, recipe, 80e9)


def test_a_critic_and_a_reference_policy_are_counted():
    sizes, ranks = PolicySizes.of(QWEN_7B), RoleSettings(actor=4)
    plain = actor_memory(sizes, Recipe(roles=ranks), checkpointing=True).device_bytes
    settings = AlgorithmSettings(advantage="gae", kl_coef=0.1)
    both = actor_memory(sizes, Recipe(roles=ranks, algorithm=settings), checkpointing=True).device_bytes
    passes = BatchSettings(passes=4)  # later passes have the log-probs of the first
    assert actor_memory(sizes, Recipe(roles=ranks, batch=passes), checkpointing=True).device_bytes == plain
    assert both - plain == pytest.approx((16 + 4) * sizes.num_parameters / 4)


def test_layers_that_are_gathered_in_half_precision_leave_no_copy_of_all_weights():
    sizes = PolicySizes.of(QWEN_7B)

    def work(ranks: int, dtype: Literal["bfloat16", "float32"], **settings: Any):
        recipe = Recipe(model=ModelSettings(dtype=dtype), roles=RoleSettings(actor=ranks), **settings)
        return actor_memory(sizes, recipe, checkpointing=False).device

    assert work(1, "bfloat16")["bfloat16 copies"] == 2 * sizes.num_layers * sizes.layer_parameters
    assert "bfloat16 copies" not in work(2, "bfloat16") and "bfloat16 copies" not in work(2, "float32")
    saved = work(2, "float32")["gathered weights"] - work(2, "bfloat16")["gathered weights"]
    assert saved == 2 * sizes.layer_parameters  # the next layer's and this one's weights, less a gradient in both types
    assert "bfloat16 copies" in work(2, "bfloat16", lora=LoraSettings(rank=8)), "weights below an adapter"
