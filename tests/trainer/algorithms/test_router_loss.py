"""The load-balancing loss is transformers' own, for a packed batch too, and a step takes the mean of its micro-batches."""

from typing import Any

import pytest
import torch
from support.actors import actor_of, batch_of, recipe_of
from support.policies import random_prompts, tiny_policy
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from headrace.comm.errors import SettingError
from headrace.trainer.algorithms.router_loss import load_balancing_loss
from headrace.trainer.policy.families import FAMILIES
from headrace.trainer.policy.model import load_policy
from headrace.trainer.policy.routers import recorded_routers
from headrace.trainer.step_metrics import StepMetrics

EXPERTS = [name for name, family in FAMILIES.items() if family.experts and family.experts.has_softmax]


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_the_loss_and_its_gradient_are_those_of_transformers(top_k):
    layers = [torch.randn(40, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_() for seed in range(3)]
    theirs: Any = load_balancing_loss_func
    loss, expected = load_balancing_loss(layers, top_k), theirs(tuple(layers), 8, top_k)
    assert torch.allclose(loss, expected, atol=1e-6)
    for found, wanted in zip(torch.autograd.grad(loss, layers), torch.autograd.grad(expected, layers), strict=True):
        assert (found - wanted).abs().max() < 1e-7


def test_a_balanced_router_has_a_loss_of_top_k_and_a_collapsed_one_more():
    balanced = 50 * torch.eye(4).repeat(5, 1)
    collapsed = torch.tensor([50.0, 0.0, 0.0, 0.0]).expand(20, 4)
    assert load_balancing_loss([balanced], 1) == pytest.approx(1.0)
    assert load_balancing_loss([collapsed], 1) == pytest.approx(4.0)


def test_a_token_with_a_weight_counts_as_so_many_tokens():
    rng = torch.Generator().manual_seed(0)
    layers = [torch.randn(9, 8, generator=rng).requires_grad_() for _ in range(3)]
    weights = torch.tensor([1, 8, 1, 2, 1, 1, 64, 3, 1])
    loss = load_balancing_loss(layers, 2, weights)
    repeated = load_balancing_loss([layer.repeat_interleave(weights, 0) for layer in layers], 2)
    assert loss.dtype == torch.float32 and torch.allclose(loss, repeated, atol=1e-6)
    for found, wanted in zip(torch.autograd.grad(loss, layers), torch.autograd.grad(repeated, layers), strict=True):
        assert (found - wanted).abs().max() < 1e-6 and found.abs().max() > 1e-3


def test_a_policy_without_routers_is_refused(tmp_path):
    policy = load_policy(tiny_policy(tmp_path), weights=False)
    with pytest.raises(SettingError, match="algorithm.router_aux_coef"), recorded_routers(policy):
        pass


@pytest.mark.parametrize("family", EXPERTS)
def test_a_packed_forward_gives_the_loss_of_a_padded_batch_in_transformers(tmp_path, family):
    path = tiny_policy(tmp_path, family)
    policy: Any = load_policy(path)
    if "router_logits" not in policy.model.base_model._can_record_outputs:
        with pytest.raises(SettingError, match="algorithm.router_aux_coef"), recorded_routers(policy):
            pass
        return  # an older transformers does not compute this family's loss either
    reference: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    prompts = random_prompts(5, longest=60)
    lengths = torch.tensor([len(p) for p in prompts])
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True)
    mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
    expected = reference(padded, attention_mask=mask, output_router_logits=True).aux_loss
    with recorded_routers(policy) as logits:
        policy.forward_packed(torch.cat([torch.tensor(p) for p in prompts]), torch.tensor([0, *lengths]).cumsum(0))
    loss = load_balancing_loss(logits, policy.config.num_experts_per_tok)
    assert len(logits) == policy.num_layers and abs(loss - expected) < 1e-6
    loss.backward()
    expected.backward()
    for name, weight in reference.named_parameters():
        if weight.grad is not None and weight.grad.abs().max() > 0:
            assert (policy.weights()[name].grad - weight.grad).abs().max() < 1e-6, name


def test_a_step_adds_the_weighted_mean_of_its_micro_batches_losses(tmp_path):
    path = tiny_policy(tmp_path, "qwen3_moe")
    batches = [batch_of(0, first, num_groups=2, total=2) for first in (0, 2)]
    gradients, metrics = [], {}
    for coef in (0.0, 0.5):
        actor, stats = actor_of(recipe_of(path, algorithm__router_aux_coef=coef)), StepMetrics()
        for batch in batches:
            actor.accumulate(batch, stats)
        named = actor.policy.weights().items()
        gradients.append({name: weight.grad for name, weight in named if weight.grad is not None})
        metrics = stats.metrics(0)
    policy: Any = load_policy(path)
    losses, weights = [], []
    for batch in batches:
        for part in batch.micro_batches:
            rows = [batch.columns[row.key] for row in part]
            tokens = [torch.tensor([*row["prompt_ids"], *row["response_ids"]]).long() for row in rows]
            with recorded_routers(policy) as logits:
                policy.forward_packed(torch.cat(tokens), torch.tensor([0, *map(len, tokens)]).cumsum(0))
            losses.append(load_balancing_loss(logits, 2))
            weights.append(sum(float(row["loss_mask"].sum()) for row in rows))
    assert len(losses) > 2
    mean = (torch.stack(losses) * torch.tensor(weights)).sum() / sum(weights)
    assert metrics["actor/router_aux_loss"] == pytest.approx(mean.item(), abs=1e-6)
    (0.5 * mean).backward()
    plain, with_loss = gradients
    for name, weight in policy.weights().items():
        added = (with_loss[name] - plain[name]) / sum(weights)
        wanted = torch.zeros_like(added) if weight.grad is None else weight.grad
        assert (added - wanted).abs().max() < 1e-5, name
