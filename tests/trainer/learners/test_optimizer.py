"""The optimizer's groups, rates and updates."""

import json
import math
import sys
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from bench.operators import Operators
from support.actors import ALONE, actor_of, batch_of, explode, on_two_ranks, recipe_of, train
from support.policies import FAMILIES, tiny_policy
from transformers import AutoModelForCausalLM, Trainer, get_scheduler

from headrace.comm.errors import SettingError
from headrace.comm.recipe import OptimizerSettings
from headrace.trainer.checkpoint import load_state, save_state, staged
from headrace.trainer.learners.builtin import Actor
from headrace.trainer.learners.optimizer import Updater, decays, learning_rate, open_optimizer, optimizer_class
from headrace.trainer.logprobs import response_logprobs
from headrace.trainer.replay.replay import replay_steps
from headrace.trainer.step_log import StepLog


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), "llama")


def contents(actor: Actor) -> list[torch.Tensor]:
    """Weights and moments."""
    moments = [value for state in actor.updater.optimizer.state.values() for value in state.values()]
    return [value.detach().clone() for value in (*actor.policy.parameters(), *moments)]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "polynomial", "inverse_sqrt"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_a_rate_is_that_of_transformers_after_a_warm_up_without_a_step_at_zero(name, warmup):
    settings = OptimizerSettings(lr=3e-4, lr_schedule=name, warmup_steps=warmup)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=3e-4)
    schedule = get_scheduler(
        "constant_with_warmup" if name == "constant" else name, optimizer, warmup, num_training_steps=20
    )
    for step in range(20):
        expected = 3e-4 * (step + 1) / (warmup + 1) if step < warmup else schedule.get_last_lr()[0]
        assert learning_rate(settings, step, 20) == expected
        optimizer.step()
        schedule.step()


def test_a_cosine_ends_at_its_share_of_the_peak():
    settings = OptimizerSettings(lr=1.0, lr_schedule="cosine", min_lr_ratio=0.1)
    rates = [learning_rate(settings, step, 100) for step in range(100)]
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 100)) / 2 for step in range(100)]
    assert rates == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parameters_with_weight_decay_are_those_of_transformers_but_for_sinks_and_rates_of_decay(family, tmp_path):
    changes = {"attention_bias": True} if family == "llama" else {}
    model = AutoModelForCausalLM.from_pretrained(tiny_policy(tmp_path, family, **changes))
    decayed = Trainer.get_decay_parameter_names(cast(Trainer, None), model)
    expected = [name for name in decayed if not name.endswith((".sinks", ".A_log"))]
    assert [name for name, parameter in model.named_parameters() if decays(name, parameter)] == [
        name for name, _ in model.named_parameters() if name in expected
    ]
    num_decayed = sum(name in expected for name, _ in model.named_parameters())
    groups = open_optimizer(model, OptimizerSettings(weight_decay=0.1)).param_groups
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [
        (0.1, num_decayed),
        (0.0, len(list(model.parameters())) - num_decayed),
    ]


def test_a_norm_bound_of_zero_switches_clipping_off(policy_dir):
    def change(bound):
        actor = actor_of(recipe_of(policy_dir, optimizer__max_grad_norm=bound))
        norm = train(actor, [batch_of(0)])["actor/grad_norm"]
        return norm, contents(actor)

    (norm, unclipped), (_, loose), (_, tight) = change(0), change(1e9), change(1e-3)
    assert norm > 1e-3
    assert all(torch.equal(a, b) for a, b in zip(unclipped, loose, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(unclipped, tight, strict=True))


def test_a_step_whose_update_was_skipped_is_the_same_in_a_replay(policy_dir, tmp_path):
    recipe, batch = recipe_of(policy_dir, run__dir=tmp_path), explode(batch_of(0))
    log = StepLog(tmp_path)
    log.add(batch)
    log.write(0)
    metrics = {"step": 0, **train(actor_of(recipe), [batch])}
    assert math.isnan(metrics["actor/grad_norm"])
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    assert replay_steps(recipe) == 0


def test_a_gradient_that_is_not_finite_leaves_weights_and_moments_and_the_version_goes_on(policy_dir, capsys):
    actor = actor_of(recipe_of(policy_dir))
    assert train(actor, [batch_of(0)])["actor/skipped_updates"] == 0
    before = contents(actor)
    metrics = train(actor, [batch_of(1), explode(batch_of(1, first=1))])
    assert metrics["actor/skipped_updates"] == 1
    assert "step 2: an update of the weights is skipped: " in capsys.readouterr().out
    assert actor.version == 2
    assert all(torch.equal(a, b) for a, b in zip(before, contents(actor), strict=True))
    assert train(actor, [batch_of(2)])["actor/skipped_updates"] == 0
    assert all(tensor.isfinite().all() for tensor in contents(actor))


def test_an_update_in_which_no_token_has_a_loss_is_skipped_and_momentum_moves_nothing(policy_dir, capsys):
    actor = actor_of(recipe_of(policy_dir, optimizer__weight_decay=0.1, algorithm__advantage="gae"))
    assert actor.critic is not None
    train(actor, [batch_of(0)])
    before, values = contents(actor), [parameter.detach().clone() for parameter in actor.critic.model.parameters()]
    batch = batch_of(1)
    for columns in batch.columns.values():
        columns["loss_mask"][:] = 0
    metrics = train(actor, [batch])
    assert metrics["actor/skipped_updates"] == metrics["critic/skipped_updates"] == 1
    assert "step 2: an update of the weights is skipped: no token has a loss" in capsys.readouterr().out
    assert all(torch.equal(a, b) for a, b in zip(before, contents(actor), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(values, actor.critic.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("column", "ids", "message"),
    [
        ("prompt_ids", [], "has an empty prompt"),
        ("prompt_ids", [1, -1], "has the token id -1, outside of the policy's vocabulary of "),
        ("response_ids", None, "has the token id 100000, outside of the policy's vocabulary of "),
    ],
)
def test_a_row_that_no_policy_can_have_drawn_names_the_engine_and_the_row(policy_dir, column, ids, message):
    recipe, batch = recipe_of(policy_dir), batch_of(0)
    row = batch.rows[0]
    columns = batch.columns[row.key]
    if ids is None:
        columns[column][-1] = 100_000
    else:
        columns[column] = np.array(ids, np.int32)
    actor = actor_of(recipe)
    for use in (lambda: train(actor, [batch]), lambda: response_logprobs(actor.policy, batch, ALONE.device, recipe)):
        with pytest.raises(SettingError, match=f"rollout.engine: row {row.key} {message}"):
            use()


def adamw_by_formula(
    weight: np.ndarray, gradients: list[np.ndarray], settings: OptimizerSettings, scale: float, norms: list[float]
) -> np.ndarray:
    """Decoupled weight decay (arXiv 1711.05101, algorithm 2) on gradients of which each update's norm is clipped, in float64."""
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for number, (gradient, norm) in enumerate(zip(gradients, norms, strict=True), 1):
        g = scale * gradient * min(1, settings.max_grad_norm / (scale * norm))
        first = settings.beta1 * first + (1 - settings.beta1) * g
        second = settings.beta2 * second + (1 - settings.beta2) * g**2
        mean, square = first / (1 - settings.beta1**number), second / (1 - settings.beta2**number)
        decay = settings.weight_decay if weight.ndim > 1 else 0.0
        weight = weight - settings.lr * (decay * weight + mean / (np.sqrt(square) + settings.eps))
    return weight


def test_updates_are_those_of_the_formula_in_few_operators():
    model, rng = torch.nn.Linear(7, 5), np.random.default_rng(0)
    settings = OptimizerSettings(lr=0.01, weight_decay=0.1, max_grad_norm=0.5)
    updater, scale = Updater(model, settings), 0.125
    before = [p.detach().double().numpy() for p in model.parameters()]
    gradients = [[rng.normal(0, size, p.shape) for p in model.parameters()] for size in (1.0, 5.0, 0.1, 2.0)]
    norms = [math.sqrt(sum(np.square(g).sum() for g in each)) for each in gradients]
    with Operators() as found:
        for each, norm in zip(gradients, norms, strict=True):
            updater.put([torch.from_numpy(g).float() for g in each])
            assert updater.update(scale, settings.lr).grad_norm == pytest.approx(scale * norm, rel=1e-6)
    for number, parameter in enumerate(model.parameters()):
        expected = adamw_by_formula(before[number], [g[number] for g in gradients], settings, scale, norms)
        assert parameter.detach().numpy() == pytest.approx(expected, abs=1e-6)
    assert found.counts["_fused_adamw_"] == 2 * 4, "a call for each group"
    assert found.counts["mul_"] + found.counts["mul"] <= 4, "the gradients are scaled and clipped at once"


def test_a_checkpoint_of_an_optimizer_of_other_kernels_continues_with_ours(policy_dir, tmp_path):
    plain, ours = actor_of(recipe_of(policy_dir)), actor_of(recipe_of(policy_dir))
    for group in plain.updater.optimizer.param_groups:
        group["fused"] = None
    train(plain, [batch_of(0)])
    save_state(staged(plain.state.state_dict()), tmp_path, team=None)
    load_state(ours.state, tmp_path, is_alone=True)
    assert all(group["fused"] for group in ours.updater.optimizer.param_groups)
    assert all(torch.equal(a, b) for a, b in zip(contents(plain), contents(ours), strict=True))
    for actor in (plain, ours):
        train(actor, [batch_of(1)])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(contents(plain), contents(ours), strict=True))


SKIP_ON_ONE_RANK = """
actor = actor_of(recipe_of(args[0]), group)
train(actor, [batch_of(0, group=group)])
before = [parameter.full_tensor().clone() for parameter in actor.policy.parameters()]
batch = batch_of(1, group=group)
metrics = train(actor, [explode(batch) if group.is_lead else batch])
assert metrics["actor/skipped_updates"] == 1
assert all(torch.equal(old, new.full_tensor()) for old, new in zip(before, actor.policy.parameters()))
"""


def test_both_ranks_skip_the_update_that_one_of_them_breaks(policy_dir, tmp_path):
    on_two_ranks(tmp_path, SKIP_ON_ONE_RANK, policy_dir)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("column", ["advantages", "rollout_logprobs", "ref_logprobs"])
def test_tokens_whose_columns_are_not_finite_have_no_loss(policy_dir, column, value, caplog):
    def change(set_values):
        actor = actor_of(recipe_of(policy_dir, algorithm__kl_coef=0.1))
        batch = batch_of(0)
        for number, columns in enumerate(batch.columns.values()):
            length = len(columns["response_ids"])
            columns["ref_logprobs"] = np.full(length, -5, np.float32)
            columns["advantages"] = np.linspace(-1, 1, length, dtype=np.float32)
            if number == 1:
                set_values(columns)
        return train(actor, [batch]), contents(actor)

    def break_one(columns):
        columns[column][0] = value

    def mask_one(columns):
        columns["loss_mask"][0] = 0

    broken, masked = change(break_one), change(mask_one)
    assert broken[0]["actor/non_finite_tokens"] == 1 and broken[0]["actor/skipped_updates"] == 0
    assert masked[0]["actor/non_finite_tokens"] == 0
    assert f"have no loss, since their {column} is not finite" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(broken[1], masked[1], strict=True))


def test_a_masked_token_never_poisons_the_gradient(policy_dir):
    actor = actor_of(recipe_of(policy_dir))
    batch = batch_of(0)
    for columns in batch.columns.values():
        columns["loss_mask"][-1] = 0
        columns["rollout_logprobs"][-1] = -math.inf
    metrics = train(actor, [batch])
    assert (metrics["actor/non_finite_tokens"], metrics["actor/skipped_updates"]) == (0, 0)


def test_a_ratio_beyond_every_number_has_a_finite_gradient(policy_dir):
    actor = actor_of(recipe_of(policy_dir))
    batch = batch_of(0)
    for columns in batch.columns.values():
        columns["rollout_logprobs"][:] = -500
    assert train(actor, [batch])["actor/skipped_updates"] == 0
    assert all(tensor.isfinite().all() for tensor in contents(actor))


def test_advantages_of_a_wrong_length_name_their_setting(policy_dir):
    batch = batch_of(0)
    next(iter(batch.columns.values()))["advantages"] = np.zeros(40, np.float32)
    with pytest.raises(SettingError, match=r"queue\.tasks: column `advantages` of row .* has 40 numbers"):
        train(actor_of(recipe_of(policy_dir)), [batch])


def test_an_8_bit_optimizer_without_its_package_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(
        SettingError, match=r"optimizer\.name: adamw8bit needs the package torchao: pip install torchao"
    ):
        optimizer_class("adamw8bit")


@pytest.mark.filterwarnings("ignore")
def test_an_8_bit_optimizer_follows_the_exact_one_and_resumes_bit_for_bit(tmp_path):
    pytest.importorskip("torchao")
    policy = tiny_policy(tmp_path, "llama", hidden_size=128, intermediate_size=256)
    eight = recipe_of(policy, optimizer__name="adamw8bit", optimizer__lr_schedule="cosine")

    def norms(actor, count):
        return [train(actor, [batch_of(actor.version)])["actor/grad_norm"] for _ in range(count)]

    unbroken, resumed, exact = actor_of(eight), actor_of(eight), actor_of(recipe_of(policy))
    assert norms(unbroken, 3) == pytest.approx(norms(exact, 3), rel=0.05)
    copy = staged(unbroken.state.state_dict())
    expected = norms(unbroken, 2)
    save_state(copy, tmp_path, team=None)
    load_state(resumed.state, tmp_path, is_alone=True)
    assert norms(resumed, 2) == expected
    kinds = {type(value).__name__ for state in unbroken.updater.optimizer.state.values() for value in state.values()}
    assert "OptimState8bit" in kinds
