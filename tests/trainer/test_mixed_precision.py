"""Sharded layers are gathered in half precision: no further from float64 than autocast over whole fp32 weights, and nothing is kept of them.

The one rank of most tests is sharded as several are, since `trainer.offload` shards it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.actors import ALONE, actor_of, batch_of, on_two_ranks, recipe_of
from support.float64 import in_float64
from support.policies import tiny_policy
from torch import nn
from torch.distributed.fsdp import FSDPModule

from headrace.comm.recipe import TrainerSettings
from headrace.trainer.actor_group import ActorGroup, gather_full
from headrace.trainer.learners.actor import Actor
from headrace.trainer.logprobs import response_logprobs
from headrace.trainer.step_metrics import StepMetrics

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
HALF: dict[str, Any] = {"model__dtype": "bfloat16"}


@contextmanager
def sharded() -> Iterator[ActorGroup]:
    group = ActorGroup(0, 1, torch.device("cpu"), 60.0, TrainerSettings(offload=True))
    try:
        yield group
    finally:
        group.close()


def logprobs_and_gradient(
    policy: Path, group: ActorGroup = ALONE, *, is_double: bool = False, is_rounded: bool = False, **settings: Any
) -> tuple[np.ndarray, torch.Tensor]:
    """Of four groups of rows alone, in several micro-batches; the weights `is_rounded` as those of the rollouts."""
    recipe = recipe_of(policy, batch__prompts_per_step=4, **settings)
    actor, batch = actor_of(recipe, group), batch_of(0, num_groups=4, total=4, group=group)
    if is_rounded:
        for parameter in actor.policy.parameters():
            parameter.data = parameter.data.bfloat16().float()
    with in_float64(actor.policy) if is_double else nullcontext():
        logprobs = np.concatenate(response_logprobs(actor.policy, batch, group.device, recipe))
        group.reshard(actor.policy)
        actor.accumulate(batch, StepMetrics())
        found = [gather_full(gradient) for gradient in actor.updater.take() if gradient is not None]
    return logprobs.astype(np.float64), torch.cat([gradient.flatten().double() for gradient in found])


def errors(found: tuple[np.ndarray, torch.Tensor], expected: tuple[np.ndarray, torch.Tensor]) -> tuple[float, float]:
    """The mean difference of log-probs, and the relative one of gradients."""
    return float(abs(found[0] - expected[0]).mean()), float((found[1] - expected[1]).norm() / expected[1].norm())


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo3", "granite", "qwen3_5_text"]
)
def test_log_probs_and_gradients_are_as_near_to_float64_as_those_of_autocast(family, tmp_path):
    """A mean of three policies, for an error of a few roundings varies by a third."""
    ratios: list[list[float]] = []
    for seed in range(3):
        policy = tiny_policy(tmp_path / str(seed), family, seed)
        whole = logprobs_and_gradient(policy, **HALF)
        with sharded() as group:
            ours = logprobs_and_gradient(policy, group, **HALF)
        ratios.append([])
        for is_rounded in (False, True):
            exact = logprobs_and_gradient(policy, is_double=True, is_rounded=is_rounded)
            ratios[-1] += [a / b for a, b in zip(errors(ours, exact), errors(whole, exact), strict=True)]
    of_weights, of_rounded_weights = np.mean(ratios, 0).reshape(2, 2)
    assert (of_weights < 1.25).all(), ratios
    assert (of_rounded_weights < 1.1).all(), f"beside the weights that rollouts have: {ratios}"


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        ("mixtral", HALF),
        ("llama", HALF | {"lora__rank": 4}),
    ],
    ids=["fp32", "experts", "adapter"],
)
def test_what_computes_in_its_own_types_is_the_same_bit_for_bit(family, settings, tmp_path):
    policy = tiny_policy(tmp_path, family)
    whole = logprobs_and_gradient(policy, **settings)
    with sharded() as group:
        ours = logprobs_and_gradient(policy, group, **settings)
    assert np.array_equal(ours[0], whole[0]) and torch.equal(ours[1], whole[1])


def layers_of(actor: Actor) -> list[nn.Module]:
    layers: Any = actor.policy.model.base_model.layers
    return [*layers]


def gathered_bytes(actor: Actor) -> int:
    """Of the layers of a policy that is gathered."""
    for layer in layers_of(actor):
        assert isinstance(layer, FSDPModule)
        layer.unshard()
    return sum(parameter.nbytes for layer in layers_of(actor) for parameter in layer.parameters())


def test_half_of_the_bytes_are_gathered_and_no_weight_is_kept_for_the_backward_pass(tmp_path):
    policy = tiny_policy(tmp_path, "qwen3")
    kept: list[torch.Tensor] = []
    with sharded() as group:
        narrow, wide = (actor_of(recipe_of(policy, **settings), group) for settings in (HALF, {}))
        assert 2 * gathered_bytes(narrow) == gathered_bytes(wide)
        group.reshard(*layers_of(narrow))
        matrices = {tuple(p.shape) for p in layers_of(narrow)[0].parameters() if p.ndim > 1}
        packed = narrow.pack(batch_of(0), [], is_updated=False)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.detach()), x)[1], lambda x: x):
            narrow._forward(packed, narrow.recipe.algorithm)
        weights = [x for x in kept if x.ndim == 2 and {tuple(x.shape), tuple(reversed(x.shape))} & matrices]
        assert len(weights) >= 7 * 2
        assert all(x.untyped_storage().size() == 0 for x in weights), "the storage of gathered weights is freed"


TWO_RANKS = """
import test_mixed_precision as own
exact = own.logprobs_and_gradient(args[0], is_double=True)
whole = own.logprobs_and_gradient(args[0], **own.HALF)
logprobs, gradient = own.logprobs_and_gradient(args[0], group, **own.HALF)
error, bound = (own.errors((exact[0], g), exact)[1] for g in (gradient * group.size, whole[1]))
assert error < 1.3 * bound, (error, bound)
"""


def test_two_ranks_sum_their_gradients_in_fp32(tmp_path):
    policy = tiny_policy(tmp_path, "qwen2")
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n" + TWO_RANKS
    on_two_ranks(tmp_path, script, policy)
