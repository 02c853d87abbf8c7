"""A replay of saved steps has the bits of the run: with any number of threads, from the initial weights and from a checkpoint, with variants."""

import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import pytest
import torch
from support.actors import actor_of, batch_of, on_two_ranks, recipe_of, train
from support.policies import tiny_policy
from support.trained_run import stale_batch, trained_run

from headrace.comm.errors import SettingError
from headrace.comm.recipe import Recipe
from headrace.launch.config.load import changed_recipe
from headrace.relay.checkpoints import CheckpointFolder
from headrace.trainer.learners.base import Learner
from headrace.trainer.recovery import train_again
from headrace.trainer.replay.pack import opened_pack
from headrace.trainer.replay.replay import NewPack, Variant, replay_pack, replay_steps
from headrace.trainer.step_log import StepLog, StepReplay

LOSS = """
import torch

NOISE = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))

def loss(inputs):
    scale = NOISE.sum()  # its last bits depend on the number of threads
    return -inputs.advantages * inputs.logprobs * scale, torch.zeros_like(inputs.logprobs, dtype=torch.bool)
"""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def recipe(tmp_path: Path):
    """Of a run whose loss depends on the number of threads, with one step that was trained with 2 of them."""
    policy = tiny_policy(tmp_path / "policy", "llama")
    (tmp_path / "own.py").write_text(LOSS)
    recipe = recipe_of(policy, run__dir=tmp_path, algorithm__loss=f"{tmp_path}/own.py:loss")
    torch.set_num_threads(2)
    log, batch = StepLog(tmp_path), batch_of(0)
    log.add(batch)
    log.write(0)
    metrics = {"step": 0, **train(actor_of(recipe), [batch])}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    return recipe


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_replay_computes_with_the_threads_of_the_run_and_gives_the_caller_its_own_back(recipe, num_threads):
    torch.set_num_threads(num_threads)
    assert replay_steps(recipe) == 0
    assert torch.get_num_threads() == num_threads


def test_another_number_of_threads_than_the_run_s_gives_other_bits(recipe, monkeypatch):
    """So the test above can fail."""
    monkeypatch.setattr(StepReplay, "same_threads", lambda _: nullcontext())
    torch.set_num_threads(1)
    assert replay_steps(recipe) == 1


def test_a_step_that_is_trained_again_has_the_bits_of_the_first_time(recipe):
    """A run that is resumed on another host has other threads there."""
    torch.set_num_threads(3)
    _, metrics = train_again(cast(Learner, actor_of(recipe)), Path(recipe.run.dir), 0)
    (recorded,) = map(json.loads, (Path(recipe.run.dir) / "metrics.jsonl").read_text().splitlines())
    assert metrics["actor/pg_loss"] == recorded["actor/pg_loss"]
    assert torch.get_num_threads() == 3


SETTINGS = {"batch__prompts_per_step": 2, "sampling__max_new_tokens": 16, "optimizer__lr": 0.01}
NUM_STEPS = 6


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), "qwen3")


def run_of(policy_dir: Path, run_dir: Path, **settings: object) -> Recipe:
    """The recipe of a run of six steps, with checkpoints after the second and the fourth."""
    recipe = recipe_of(policy_dir, **(SETTINGS | settings), run__dir=run_dir)
    steps = [[stale_batch(step, number, total=2) for number in range(2)] for step in range(NUM_STEPS)]
    trained_run(recipe, steps, checkpoints=(2, 4))
    return recipe


def variant_of(recipe: Recipe, words: str) -> Variant:
    return Variant(words, changed_recipe(recipe, words.split()).algorithm)


def told(capsys: pytest.CaptureFixture[str]) -> tuple[list[int], str]:
    """The steps that were trained again, counted from 1, and everything printed."""
    text = capsys.readouterr().out
    return [int(number) for number in re.findall(r"^step +(\d+) .* the same$", text, re.MULTILINE)], text


@pytest.mark.parametrize(
    ("steps", "trained"),
    [(None, [1, 2, 3, 4, 5, 6]), ((4, 4), [3, 4]), ((3, 5), [3, 4, 5]), ((1, 2), [1, 2]), ((6, 6), [5, 6])],
)
def test_a_replay_begins_with_the_newest_checkpoint_before_its_steps(policy_dir, tmp_path, capsys, steps, trained):
    recipe = run_of(policy_dir, tmp_path / "run")
    assert replay_steps(recipe, steps) == 0
    assert told(capsys)[0] == trained


@pytest.mark.parametrize("settings", [{"algorithm__advantage": "gae"}, {"lora__rank": 2}], ids=["gae", "lora"])
def test_a_replay_from_a_checkpoint_has_the_critic_and_the_adapter(policy_dir, tmp_path, capsys, settings):
    recipe = run_of(policy_dir, tmp_path / "run", **settings)
    assert replay_steps(recipe, (5, 6)) == 0
    assert told(capsys)[0] == [5, 6]


def test_without_the_first_rows_a_replay_trains_all_steps_that_it_can(policy_dir, tmp_path, capsys):
    """As after run.save_rows=recovery."""
    recipe = run_of(policy_dir, tmp_path / "run")
    for step in range(2):
        (tmp_path / "run" / "rows" / f"step_{step}.safetensors").unlink()
    assert replay_steps(recipe) == 0
    trained, text = told(capsys)
    assert trained == [3, 4, 5, 6]
    assert f"the replay begins after step 2, with {tmp_path}/run/checkpoints/step_2\n" in text


def test_a_damaged_checkpoint_is_skipped_for_an_earlier_one(policy_dir, tmp_path, capsys):
    recipe = run_of(policy_dir, tmp_path / "run")
    folder = CheckpointFolder(tmp_path / "run")
    (shard,) = (folder.path(4) / "dcp").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert replay_steps(recipe, (5, 5)) == 0
    trained, text = told(capsys)
    assert trained == [3, 4, 5] and "checkpoints/step_4 has " in text and "it is skipped" in text


def test_steps_that_cannot_be_reached_are_refused_with_what_is_missing(policy_dir, tmp_path):
    recipe = run_of(policy_dir, tmp_path / "run")
    for step, words in (
        (4, "step 5 of the run in .*: rows/step_4.safetensors is missing"),
        (2, "step 3 of the run in"),
    ):
        path = tmp_path / "run" / "rows" / f"step_{step}.safetensors"
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(SettingError, match=words) as refused:
            replay_steps(recipe, (step + 1, step + 1))
        assert "run.save_rows=all" in str(refused.value)
        path.write_bytes(content)
    for steps in ((0, 1), (3, 7), (4, 3)):
        with pytest.raises(SettingError, match=r"--steps .* has trained steps 1 to 6"):
            replay_steps(recipe, steps)


@pytest.mark.parametrize("line", ['{"step": 3, "time_s"', "[1]", '{"time_s": 1.5}'])
def test_a_broken_line_of_the_metrics_is_named(policy_dir, tmp_path, line):
    recipe = run_of(policy_dir, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([*lines[:3], line, *lines[4:]]) + "\n")
    with pytest.raises(SettingError, match=r"line 4 of .*metrics\.jsonl is not the metrics of a step"):
        replay_steps(recipe, None)


def test_the_steps_are_those_of_the_run_whatever_the_variants_are(policy_dir, tmp_path, capsys):
    """Their gradients are not applied. The steps before those asked for have no figures."""
    recipe = run_of(policy_dir, tmp_path / "run")
    variants = [variant_of(recipe, "algorithm.loss=gspo algorithm.proximal=rollout"), variant_of(recipe, "")]
    assert replay_steps(recipe, (4, 5), variants) == 0
    trained, text = told(capsys)
    assert trained == [3, 4, 5]
    assert "variant 1: algorithm.loss=gspo algorithm.proximal=rollout\nvariant 2: no change\n" in text
    lines = text.partition("\nstep    4 ")[2].splitlines()
    assert [line.split()[:2] for line in lines[2:5]] == [["the", "run"], ["variant", "1"], ["variant", "2"]]
    own, other, same = (line.split()[2:] for line in lines[2:5])
    assert own[:-1] == same[:-1] and own[-1] == "-" and same[-1] == "+1.000000"
    assert other[-1] != same[-1] and other[0] != own[0]
    assert text.count("the run  ") == 2, "steps 4 and 5"


def test_variants_that_need_what_the_run_does_not_have_are_refused(policy_dir, tmp_path):
    recipe = run_of(policy_dir, tmp_path / "run")
    for words, why in (
        ("algorithm.advantage=gae", "needs a critic"),
        ("algorithm.kl_coef=0.1", "log-probs of the initial"),
    ):
        with pytest.raises(SettingError, match=rf'--with "{words}": .*{why}'):
            replay_steps(recipe, (5, 5), [variant_of(recipe, words)])


def test_steps_of_another_trainer_are_refused(policy_dir, tmp_path):
    recipe = recipe_of(policy_dir, run__dir=tmp_path, trainer__engine="own.py:Engine")
    with pytest.raises(SettingError, match=r"trainer\.engine=own\.py:Engine: only steps of the built-in trainer"):
        replay_steps(recipe)


TWO_RANKS = """
import json
from headrace.relay.checkpoints import CheckpointFolder
from headrace.trainer.checkpoint import save_state, staged
from headrace.trainer.step_log import StepLog
recipe = recipe_of(args[0], **eval(args[2]), run__dir=args[1], roles__actor=2)
run_dir = Path(args[1])
log = StepLog(run_dir, group.rank, 2)
actor = actor_of(recipe, group)
team = group.clone_for_thread()
lines = []
for step in range(3):
    batches = [batch_of(step, first=number, total=2, group=group) for number in range(2)]
    for batch in batches:
        log.add(batch)
    log.write(step)
    lines.append({"step": step, **train(actor, batches)})
    if step == 0:
        folder = CheckpointFolder(run_dir)
        path = folder.path(1)
        if group.is_lead:
            folder.begin(1)
        group.all_reduce_sum([0.0])
        save_state(staged(actor.state.state_dict()), path, team)
        if group.is_lead:
            folder.seal(1)
if group.is_lead:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # rank 0 is this process
@pytest.mark.slow
def test_two_ranks_are_replayed_from_their_checkpoint_with_variants_and_packed(policy_dir, tmp_path, capsys):
    """The second update of a step depends on the optimizer's moments."""
    settings = SETTINGS | {"batch__updates_per_version": 2}
    (run_dir := tmp_path / "run").mkdir()
    on_two_ranks(tmp_path, TWO_RANKS, policy_dir, run_dir, repr(settings))
    recipe = recipe_of(policy_dir, **settings, run__dir=run_dir, roles__actor=2)
    pack_file = tmp_path / "pack"
    assert replay_steps(recipe, (3, 3), [variant_of(recipe, "")], NewPack(pack_file, "1")) == 0
    trained, text = told(capsys)
    assert trained == [2, 3] and "+1.000000" in text
    with opened_pack(pack_file) as (pack, folder):
        assert replay_pack(pack.recipe(folder), pack, folder) == 0
    assert told(capsys)[0] == [3]
