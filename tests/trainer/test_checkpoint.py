"""A checkpoint holds everything that training needs to continue bit for bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.policies import tiny_policy
from transformers import AutoModelForCausalLM

from headrace.comm.messages import GroupId, TrainBatch
from headrace.comm.messages.queue import GroupRef
from headrace.comm.recipe import ModelSettings, OptimizerSettings, Recipe
from headrace.relay.queue.batch import Batch
from headrace.trainer.actor_group import ActorGroup
from headrace.trainer.checkpoint import Checkpoints
from headrace.trainer.learners.builtin import Actor
from headrace.trainer.policy.model import load_tokenizer, save_policy
from headrace.trainer.step_stats import StepStats

ALONE = ActorGroup(rank=0, size=1, device=torch.device("cpu"), deadline_s=10)


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), "qwen3")


def actor_of(policy_dir: Path) -> Actor:
    torch.manual_seed(0)
    optimizer = OptimizerSettings(lr=1e-3, warmup_steps=3)
    return Actor(Recipe(model=ModelSettings(path=str(policy_dir)), optimizer=optimizer), ALONE)


def random_row(key: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(list(key.encode()))
    return {
        "prompt_ids": rng.integers(4, 99, 5).astype(np.int32),
        "response_ids": rng.integers(4, 99, 7).astype(np.int32),
        "rollout_logprobs": -4 * np.ones(7, dtype=np.float32),
        "loss_mask": np.ones(7, dtype=np.uint8),
        "truncated": np.zeros(1, dtype=np.uint8),
    }


def batch_of(step: int) -> Batch:
    """Two random trajectories of a prompt."""
    group = GroupRef(GroupId(0, step), [0, 1], [1, 1], [["relay-0#1"]] * 2, [step, step], [12, 12], [0.0, 1.0])
    rows = group.rows()
    taken = TrainBatch(step=step, first=0, total=1, groups=[group], metrics={})
    return Batch(taken, [rows], {row.key: random_row(row.key) for row in rows})


def train(actor: Actor, num_steps: int) -> list[float]:
    norms = []
    for step in range(actor.version, actor.version + num_steps):
        stats = StepStats()
        actor.accumulate(batch_of(step), stats)
        norms.append(actor.step(stats)["actor/grad_norm"])
    return norms


def test_a_resumed_run_continues_bit_for_bit(policy_dir: Path, tmp_path: Path):
    unbroken = actor_of(policy_dir)
    train(unbroken, 4)
    expected = train(unbroken, 3)
    broken = actor_of(policy_dir)
    train(broken, 4)
    random_number = torch.get_rng_state()
    Checkpoints(tmp_path, keep=2, group=ALONE).save(broken.state)
    resumed = actor_of(policy_dir)
    torch.manual_seed(99)
    Checkpoints(tmp_path, keep=2, group=ALONE).load(resumed.state, 4)
    assert resumed.version == 4
    assert torch.equal(torch.get_rng_state(), random_number)
    assert train(resumed, 3) == expected
    for name, weight in unbroken.policy.weights().items():
        assert torch.equal(weight, resumed.policy.weights()[name]), name


def test_the_pointer_names_only_complete_checkpoints_and_old_ones_are_removed(policy_dir: Path, tmp_path: Path):
    actor = actor_of(policy_dir)
    checkpoints = Checkpoints(tmp_path, keep=2, group=ALONE)
    assert checkpoints.latest() is None
    for _ in range(3):
        train(actor, 1)
        checkpoints.save(actor.state)
    (checkpoints.folder / "step_9").mkdir()
    assert checkpoints.latest() == 3
    assert not checkpoints.path(1).exists()


def test_the_export_gives_the_trained_policys_logits_in_plain_transformers(policy_dir: Path, tmp_path: Path):
    actor = actor_of(policy_dir)
    train(actor, 2)
    save_policy(actor.policy, tmp_path, load_tokenizer(policy_dir))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(4, 40)
    with torch.no_grad():
        hidden = actor.policy.forward_packed(tokens, torch.tensor([0, len(tokens)], dtype=torch.int32))
        ours, theirs = actor.policy.logits(hidden), plain(tokens[None]).logits[0]
    assert (ours - theirs).abs().max() < 2e-5


def test_the_learning_rate_warms_up_and_stays(policy_dir: Path):
    actor = actor_of(policy_dir)
    rates = []
    for _ in range(6):
        rates.append(actor.lr())
        train(actor, 1)
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])
