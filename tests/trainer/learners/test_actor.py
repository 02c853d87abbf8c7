"""The updates of a step: by parts of its groups, in several passes, on several ranks, as by hand with transformers in float64."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.actors import actor_of, batch_of, on_two_ranks, recipe_of, train, with_equal_rewards
from support.policies import tiny_policy
from transformers import AutoModelForCausalLM

from headrace.relay.queue.batch import Batch
from headrace.trainer.checkpoint import load_state, save_state, staged
from headrace.trainer.learners import actor as actor_module
from headrace.trainer.learners.actor import Actor
from headrace.trainer.step_metrics import StepMetrics

# A large epsilon makes an update smooth in its gradient, so that float32 and float64 stay together.
SMOOTH: dict[str, Any] = {
    "optimizer__eps": 1.0,
    "optimizer__lr": 0.5,
    "batch__prompts_per_step": 4,
    "optimizer__max_grad_norm": 0.5,
    "algorithm__proximal": "rollout",
}
DECOUPLED = SMOOTH | {"algorithm__proximal": "version"}
ADAM: dict[str, Any] = {"lr": 0.5, "betas": (0.9, 0.95), "eps": 1.0, "weight_decay": 0.0}
CRITIC_ADAM: dict[str, Any] = ADAM | {"lr": 0.3}
CLIP = 0.2


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), "qwen3")


def groups_of(step: int) -> list[Batch]:
    """Four groups in four batches."""
    return [batch_of(step, first=number, total=4) for number in range(4)]


def rows_of(batches: Sequence[Batch]) -> list[tuple[dict[str, np.ndarray], float]]:
    """Columns and GRPO's advantage of each row."""
    found = []
    for batch in batches:
        for group in batch.row_batch.groups:
            rewards = np.array(group.rewards)
            advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
            found += [(batch.columns[ref.key], a) for ref, a in zip(group.rows(), advantages, strict=True)]
    return found


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array, np.float64))


def logprobs_by_hand(model: Any, columns: dict[str, np.ndarray]) -> torch.Tensor:
    prompt, response = (columns[name].tolist() for name in ("prompt_ids", "response_ids"))
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def loss_by_hand(model: Any, batches: Sequence[Batch]) -> torch.Tensor:
    """Mean over tokens of the clipped surrogate against the policy that generated."""
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for columns, advantage in rows_of(batches):
        ratio = (logprobs_by_hand(model, columns) - tensor(columns["rollout_logprobs"])).exp()
        total = total - torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).sum()
        num_tokens += len(ratio)
    return total / num_tokens


def exact_model(policy_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float64, attn_implementation="eager")


def step_by_hand(model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> float:
    optimizer.zero_grad()
    loss().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return float(norm)


def assert_close(actor: Actor, model: Any, bound: float = 2e-6) -> None:
    for name, weight in model.named_parameters():
        ours = actor.policy.model.get_parameter(name)
        assert (ours.double() - weight).abs().max() < bound, name


@pytest.mark.parametrize(("updates", "passes"), [(1, 1), (2, 1), (4, 1), (1, 3), (2, 2), (3, 2)])
def test_updates_of_a_version_are_separate_optimizer_steps(policy_dir, updates, passes):
    actor = actor_of(recipe_of(policy_dir, batch__updates_per_version=updates, batch__passes=passes, **SMOOTH))
    model = exact_model(policy_dir)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(2):
        batches = groups_of(step)
        ends = [4 * update // updates for update in range(updates + 1)]
        norms = [
            step_by_hand(model, optimizer, lambda part=batches[start:end]: loss_by_hand(model, part))
            for _ in range(passes)
            for start, end in pairwise(ends)
        ]
        metrics = train(actor, batches)
        assert metrics["actor/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
    assert_close(actor, model)
    assert actor.version == 2


@pytest.mark.parametrize("num_equal", [2, 4], ids=["half of the groups", "all groups"])
def test_groups_without_a_gradient_change_no_bit_of_an_update_when_their_backward_pass_is_left_out(
    policy_dir, num_equal, monkeypatch
):
    """Weights, moments and metrics; with all groups too, where the update follows the momentum alone."""
    backward_passes: list[int] = []
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda *a, **k: backward_passes.append(0) or backward(*a, **k))
    found: list[tuple[Any, ...]] = []
    for num_forward in (0, 99):
        actor = actor_of(recipe_of(policy_dir, **DECOUPLED))
        train(actor, groups_of(0))
        backward_passes.clear()
        batches = groups_of(1)
        equal = [with_equal_rewards(batch, min(num_forward, len(batch.micro_batches))) for batch in batches[:num_equal]]
        metrics = train(actor, [*equal, *batches[num_equal:]])
        metrics.pop("timing_s/update_actor")
        state = [*actor.policy.parameters(), *(m["exp_avg"] for m in actor.updater.optimizer.state.values())]
        found.append((len(backward_passes), metrics, state))
    (num_before, metrics, state), (num_after, same_metrics, same_state) = found
    assert num_after == num_before - sum(len(batch.micro_batches) for batch in groups_of(1)[:num_equal])
    assert metrics == same_metrics and metrics["actor/entropy"] > 0
    assert all(map(torch.equal, state, same_state))


def test_a_rank_without_rows_for_a_micro_batch_trains_the_others_as_if_it_were_not_there(policy_dir):
    actors = [actor_of(recipe_of(policy_dir, batch__passes=2, **DECOUPLED)) for _ in range(2)]
    for batch in (batches := groups_of(0)):
        batch.micro_batches.append([])
    for actor, given in zip(actors, (groups_of(0), batches), strict=True):
        train(actor, given)
    for ours, theirs in zip(*(actor.policy.parameters() for actor in actors), strict=True):
        assert torch.equal(ours, theirs)


def test_a_run_that_ends_between_the_updates_of_a_step_says_so(policy_dir, capsys):
    actor = actor_of(recipe_of(policy_dir, batch__updates_per_version=2, **DECOUPLED))
    before = [parameter.detach().clone() for parameter in actor.policy.parameters()]
    for count, batch in enumerate(groups_of(0)[:2]):
        assert all(torch.equal(a, b) for a, b in zip(before, actor.policy.parameters(), strict=True)), count
        actor.accumulate(batch, StepMetrics())
    actor.discard()
    assert not all(torch.equal(a, b) for a, b in zip(before, actor.policy.parameters(), strict=True))
    assert "the weights include 1 of the 2 updates of step 1" in capsys.readouterr().out
    actor.discard()
    assert not capsys.readouterr().out


def test_every_update_of_a_version_keeps_to_the_policy_of_its_start(policy_dir):
    actor = actor_of(recipe_of(policy_dir, batch__updates_per_version=2, batch__passes=2, **DECOUPLED))
    model, start = exact_model(policy_dir), exact_model(policy_dir)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)

    def loss(part: Sequence[Batch]) -> torch.Tensor:
        losses = []
        for columns, advantage in rows_of(part):
            logprobs = logprobs_by_hand(model, columns)
            proximal = logprobs_by_hand(start, columns).detach()
            weight = (proximal - tensor(columns["rollout_logprobs"])).exp().clamp(max=2)
            shift = proximal.exp() - tensor(columns["rollout_logprobs"]).exp()
            weight = weight * (shift <= 0.1 if advantage > 0 else shift >= -0.1)
            ratio = (logprobs - proximal).exp()
            pull = 0.01 * (logprobs - tensor(columns["rollout_logprobs"])).square() * (advantage != 0)
            losses.append(pull - weight * torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage))
        return torch.cat(losses).mean()

    for step in range(2):
        batches = groups_of(step)
        start.load_state_dict(model.state_dict())
        for part in (batches[:2], batches[2:]) * 2:
            step_by_hand(model, optimizer, lambda part=part: loss(part))
        train(actor, batches)
    assert_close(actor, model)


def test_an_update_follows_as_soon_as_its_part_of_the_groups_has_arrived(policy_dir):
    actor = actor_of(recipe_of(policy_dir, batch__updates_per_version=2, **SMOOTH))
    batches, stats = groups_of(0), StepMetrics()
    before = [parameter.detach().clone() for parameter in actor.policy.parameters()]

    def has_moved() -> bool:
        return not all(torch.equal(a, b) for a, b in zip(before, actor.policy.parameters(), strict=True))

    moved = []
    for batch in batches:
        actor.accumulate(batch, stats)
        moved.append(has_moved())
    assert moved == [False, True, True, True]
    assert actor.version == 0
    actor.step(stats)
    assert actor.version == 1


def test_the_time_of_an_update_has_the_work_that_a_device_has_only_queued(policy_dir, monkeypatch):
    clock = [0.0]

    def finish_work(_: torch.device) -> None:
        clock[0] += 10.0

    monkeypatch.setattr(actor_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(actor_module, "finish_work", finish_work)
    metrics = train(actor_of(recipe_of(policy_dir, **SMOOTH)), groups_of(0))
    assert metrics["timing_s/update_actor"] == 10 * (4 + 1), "four batches, and the update"


def test_the_proximal_policy_is_that_of_the_start_of_the_version(policy_dir):
    recipe = recipe_of(policy_dir, batch__updates_per_version=4, batch__passes=2, **DECOUPLED)
    actor, stats, model = actor_of(recipe), StepMetrics(), exact_model(policy_dir)
    for batch in groups_of(0):
        actor.accumulate(batch, stats)
    with torch.no_grad():
        for batch in actor.batches:
            for key, row in batch.by_key.items():
                expected = logprobs_by_hand(model, batch.batch.columns[key]).numpy()
                assert row.proximal_logprobs == pytest.approx(expected, abs=2e-5)
    assert len(actor.updates) == 3


def test_a_run_that_ends_within_a_step_leaves_nothing_for_the_next(policy_dir):
    settings = SMOOTH | {"batch__updates_per_version": 2, "algorithm__advantage": "gae"}
    actor, fresh = actor_of(recipe_of(policy_dir, **settings)), actor_of(recipe_of(policy_dir, **settings))
    actor.accumulate(groups_of(0)[0], StepMetrics())
    actor.discard()
    ours, theirs = train(actor, groups_of(0)), train(fresh, groups_of(0))
    assert {name for name in ours if ours[name] != theirs[name]} <= {"timing_s/update_actor"}


GAE: dict[str, Any] = {
    "algorithm__advantage": "gae", "algorithm__gamma": 0.98, "algorithm__lam": 0.9, "critic__lr": 0.3,
    "critic__clip_value": 0.1, "batch__updates_per_version": 2, "batch__passes": 2, **SMOOTH,
}  # fmt: skip


class PpoByHand:
    """PPO with a critic in float64: the policy, the critic, and a step for each group of four."""

    def __init__(self, policy_dir: Path) -> None:
        self.policy, self.backbone = exact_model(policy_dir), exact_model(policy_dir).model
        self.head = torch.nn.Linear(self.backbone.config.hidden_size, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(self.head.weight)
        self.critic = torch.nn.ModuleList([self.backbone, self.head])
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), **ADAM)
        self.critic_optimizer = torch.optim.AdamW(self.critic.parameters(), **CRITIC_ADAM)

    def values(self, columns: dict[str, np.ndarray]) -> torch.Tensor:
        prompt, response = (columns[name].tolist() for name in ("prompt_ids", "response_ids"))
        hidden = self.backbone(torch.tensor([prompt + response])).last_hidden_state[0]
        return self.head(hidden[len(prompt) - 1 : -1])[:, 0]

    def step(self, batches: Sequence[Batch], *, has_policy_updates: bool = True) -> None:
        rows = []
        for batch in batches:
            for row in batch.row_batch.rows():
                columns = batch.columns[row.key]
                values = self.values(columns).detach().numpy()
                advantage, advantages = 0.0, []
                for t in reversed(range(len(values))):
                    is_last = t == len(values) - 1
                    error = row.reward * is_last + (0 if is_last else 0.98 * values[t + 1]) - values[t]
                    advantage = error + 0.98 * 0.9 * advantage
                    advantages.insert(0, advantage)
                rows.append((row.row.prompt, columns, values, np.array(advantages)))
        joined = np.concatenate([advantages for *_, advantages in rows])
        mean, std = joined.mean(), np.sqrt(joined.var(ddof=1) + 1e-8)
        parts = [rows[:6], rows[6:]]
        for part in parts * 2:
            if has_policy_updates:
                step_by_hand(self.policy, self.optimizer, lambda part=part: self.policy_loss(part, mean, std))
            step_by_hand(self.critic, self.critic_optimizer, lambda part=part: self.value_loss(part))

    def policy_loss(self, part, mean: float, std: float) -> torch.Tensor:
        losses = []
        for _, columns, _, advantages in part:
            ratio = (logprobs_by_hand(self.policy, columns) - tensor(columns["rollout_logprobs"])).exp()
            white = tensor((advantages - mean) / std)
            losses.append(-torch.minimum(ratio * white, ratio.clamp(1 - CLIP, 1 + CLIP) * white))
        return torch.cat(losses).mean()

    def value_loss(self, part) -> torch.Tensor:
        losses = []
        for _, columns, old, advantages in part:
            values, before, returns = self.values(columns), tensor(old), tensor(advantages + old)
            bounded = before + (values - before).clamp(-0.1, 0.1)
            losses.append(torch.maximum((values - returns) ** 2, (bounded - returns) ** 2) / 2)
        return torch.cat(losses).mean()


@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_ppo_with_a_critic_is_as_by_hand(policy_dir, warmup_steps):
    actor, hand = actor_of(recipe_of(policy_dir, critic__warmup_steps=warmup_steps, **GAE)), PpoByHand(policy_dir)
    for step in range(3):
        train(actor, groups_of(step))
        hand.step(groups_of(step), has_policy_updates=step >= warmup_steps)
    assert_close(actor, hand.policy, 1e-5)
    assert actor.critic is not None
    for name, weight in hand.backbone.named_parameters():
        ours = actor.critic.model.policy.model.model.get_parameter(name)
        assert (ours.double() - weight).abs().max() < 1e-5, name
    assert (actor.critic.model.head.weight.double() - hand.head.weight).abs().max() < 1e-5
    assert hand.head.weight.abs().max() > 1e-3


def test_a_warm_up_of_the_critic_leaves_weights_and_moments_of_the_policy(policy_dir):
    actor = actor_of(recipe_of(policy_dir, critic__warmup_steps=1, **GAE))
    before = {name: weight.detach().clone() for name, weight in actor.policy.weights().items()}
    metrics = train(actor, groups_of(0))
    assert all(torch.equal(weight, before[name]) for name, weight in actor.policy.weights().items())
    assert not actor.updater.optimizer.state
    assert metrics["actor/grad_norm"] == metrics["actor/skipped_updates"] == 0 < metrics["critic/grad_norm"]
    train(actor, groups_of(1))
    assert not all(torch.equal(weight, before[name]) for name, weight in actor.policy.weights().items())


def test_the_critics_metrics_are_those_of_its_values_before_the_updates(policy_dir):
    actor = actor_of(recipe_of(policy_dir, **GAE | {"batch__passes": 1}))
    metrics = train(actor, groups_of(0))
    assert metrics["critic/values_mean"] == 0
    assert metrics["critic/vf_explained_var"] == 0
    assert metrics["critic/lr"] == 0.3
    train(actor, groups_of(1))
    batch = groups_of(2)
    metrics = train(actor, batch)
    assert metrics["critic/values_mean"] != 0 and metrics["critic/grad_norm"] > 0
    assert metrics["critic/skipped_updates"] == 0


TWO_RANKS = """
from safetensors.torch import save_file
actor = actor_of(recipe_of(args[0], **eval(args[2])), group)
for step in range(3):
    train(actor, [batch_of(step, first=number, total=4, group=group) for number in range(4)])
models = {"policy": actor.policy.model} | ({"critic": actor.critic.model} if actor.critic else {})
weights = {f"{m}.{name}": p.full_tensor().contiguous() for m, model in models.items() for name, p in model.named_parameters()}
if group.is_lead:
    save_file(weights, args[1])
"""


@pytest.mark.parametrize(
    "settings",
    [
        GAE,
        pytest.param(GAE | {"critic__warmup_steps": 1}, marks=pytest.mark.slow),
        pytest.param(DECOUPLED | {"batch__updates_per_version": 4}, marks=pytest.mark.slow),
        pytest.param(GAE | {"lora__rank": 3, "batch__updates_per_version": 2}, marks=pytest.mark.slow),
    ],
    ids=["gae", "warmup", "updates", "lora"],
)
def test_two_ranks_update_like_one(policy_dir, tmp_path, settings):
    on_two_ranks(tmp_path, TWO_RANKS, policy_dir, tmp_path / "weights", repr(settings))
    actor = actor_of(recipe_of(policy_dir, **settings))
    for step in range(3):
        train(actor, groups_of(step))
    sharded = load_file(tmp_path / "weights")
    models = {"policy": actor.policy.model} | ({"critic": actor.critic.model} if actor.critic else {})
    own = {f"{m}.{name}": p for m, model in models.items() for name, p in model.named_parameters()}
    assert own.keys() == sharded.keys()
    for name, weight in own.items():
        assert (weight - sharded[name]).abs().max() < 2e-6, name


FORWARD_ON_TWO_RANKS = """
from safetensors.torch import save_file
actor = actor_of(recipe_of(args[0], **eval(args[2])), group)
for step in range(2):
    batches = [batch_of(step, first=number, total=4, group=group) for number in range(4)]
    train(actor, [*(with_equal_rewards(batch, len(batch.micro_batches)) for batch in batches[:2]), *batches[2:]])
weights = {name: p.full_tensor().contiguous() for name, p in actor.policy.model.named_parameters()}
if group.is_lead:
    save_file(weights, args[1])
"""


def test_two_ranks_leave_out_the_same_backward_passes(policy_dir, tmp_path):
    on_two_ranks(tmp_path, FORWARD_ON_TWO_RANKS, policy_dir, tmp_path / "weights", repr(DECOUPLED))
    actor = actor_of(recipe_of(policy_dir, **DECOUPLED))
    for step in range(2):
        batches = groups_of(step)
        train(actor, [*(with_equal_rewards(batch, 0) for batch in batches[:2]), *batches[2:]])
    sharded = load_file(tmp_path / "weights")
    for name, weight in actor.policy.model.named_parameters():
        assert (weight - sharded[name]).abs().max() < 2e-6, name


@pytest.mark.parametrize("settings", [GAE, {"batch__updates_per_version": 2, "batch__prompts_per_step": 4}])
def test_a_resumed_run_continues_bit_for_bit_with_a_schedule_updates_and_a_critic(policy_dir, tmp_path, settings):
    schedule = {"optimizer__lr_schedule": "cosine", "optimizer__warmup_steps": 2, "run__steps": 8}
    recipe = recipe_of(policy_dir, **settings | schedule)

    def steps(actor: Actor, count: int) -> list[dict[str, object]]:
        found = [train(actor, groups_of(actor.version)) for _ in range(count)]
        return [{name: value for name, value in metrics.items() if "timing" not in name} for metrics in found]

    unbroken, broken, resumed = (actor_of(recipe) for _ in range(3))
    steps(unbroken, 3)
    expected = steps(unbroken, 2)
    steps(broken, 3)
    save_state(staged(broken.state.state_dict()), tmp_path, team=None)
    load_state(resumed.state, tmp_path, is_alone=True)
    assert steps(resumed, 2) == expected
