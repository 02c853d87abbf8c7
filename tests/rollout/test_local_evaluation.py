"""An evaluation without a run: its samples, scores and metrics are those of the engine, the reward functions and the formulas."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.closing import at_end

from headrace.comm.recipe import Recipe
from headrace.launch.config.load import read_recipe
from headrace.relay.queue.evaluation_prompts import open_evaluation
from headrace.rollout import Engine, SamplingParams
from headrace.rollout.engine.memory import AvailableMemory, plan_cache, sequences_that_fit
from headrace.rollout.local_evaluation import LocalEvaluation, LocalGenerator, ScoredSample
from headrace.rollout.rewards.pool import open_rewards

REWARDS = '''
"""Rewards that say what they were called with."""

import time

def even(solution_str, bonus):
    return float(len(solution_str) % 2 == 0) + bonus

def of_group(completions, **columns):
    return [float(len(completions))] * len(completions)

def length(completions, **columns):
    return [float(len(each)) for each in completions]

def none_for_first(completions, bonus, **columns):
    return [None if each else 1.0 for each in bonus]

class Echo:
    """Repeats the second turn's length, and ends after it."""

    def reset(self, prompt, **row):
        self.turns = 0
        return "!"

    def step(self, completion):
        self.turns += 1
        return f"[{len(completion)}]", 0.5, self.turns == 2
'''
PROMPTS = ("ab", "once upon a time", "the cat")
STOPS = "sampling.stop=[a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q,r,s]"
Evaluate = Callable[..., tuple[LocalEvaluation, list[ScoredSample]]]


def recipe_of(folder: Path, policy: Path, *words: str) -> Recipe:
    (folder / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": prompt, "bonus": 2 * (index == 0)} for index, prompt in enumerate(PROMPTS)]
    (folder / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"model.path={policy}", f"eval.path={folder / 'held-out.jsonl'}", "sampling.max_new_tokens=12"]
    return read_recipe(None, [*settings, *(word.replace("rewards.py", str(folder / "rewards.py")) for word in words)])


@pytest.fixture
def evaluate(tmp_path: Path, llama: Path) -> Evaluate:
    """Evaluates with these settings, at most `max_running` samples at a time; returns the evaluation and its samples by their place."""

    def run(*words: str, max_running: int = 4) -> tuple[LocalEvaluation, list[ScoredSample]]:
        recipe = recipe_of(tmp_path, llama, *words)
        prompts = open_evaluation(recipe.data, recipe.eval, recipe.run.steps, 1)
        assert prompts is not None
        generator = LocalGenerator(recipe, PROMPTS[1], 100, max_running)
        evaluation = LocalEvaluation(recipe, prompts, generator, open_rewards(recipe.reward, 10, "builtin"), 7)
        at_end(evaluation.close)
        found = [sample for samples in evaluation.turns() for sample in samples]
        assert evaluation.num_elsewhere == evaluation.num_decoding == 0
        return evaluation, sorted(found, key=lambda sample: sample.event.row)

    return run


def greedy(llama: Path) -> list[str]:
    engine = Engine(llama, max_running=4)
    return [done.text for done in engine.generate(PROMPTS, SamplingParams(max_new_tokens=12, temperature=0))]


def test_greedy_responses_are_those_of_the_engine_and_have_their_rewards(evaluate: Evaluate, llama: Path):
    evaluation, samples = evaluate("reward.path=rewards.py:even", max_running=2)
    texts = greedy(llama)
    rewards = [float(len(text) % 2 == 0) + 2 * (index == 0) for index, text in enumerate(texts)]
    assert [sample.text for sample in samples] == texts
    assert [sample.event.reward for sample in samples] == rewards
    assert [(sample.name, sample.row) for sample in samples] == [("held-out", 0), ("held-out", 1), ("held-out", 2)]
    metrics = evaluation.metrics()
    assert metrics["eval/version"] == 7
    assert metrics["eval/held-out/avg@1"] == pytest.approx(sum(rewards) / 3)
    assert metrics["eval/held-out/pass@1"] == pytest.approx(sum(reward >= 1 for reward in rewards) / 3)
    lengths = [sample.event.num_tokens for sample in samples]
    assert metrics["eval/held-out/response_length/mean"] == pytest.approx(sum(lengths) / 3)
    assert metrics["eval/held-out/response_length/clip_ratio"] == sum(s.event.is_truncated for s in samples) / 3
    assert metrics["eval/held-out/missing"] == 0


def test_several_functions_are_summed_and_each_has_its_mean(evaluate: Evaluate):
    evaluation, samples = evaluate("reward.path=[rewards.py:even,rewards.py:length]", "reward.weights=[1,10]")
    metrics = evaluation.metrics()
    mean = sum(len(sample.text) for sample in samples) / 3
    assert metrics["eval/held-out/reward/length"] == pytest.approx(mean)
    whole = metrics["eval/held-out/reward/even"] + 10 * mean
    assert metrics["eval/held-out/avg@1"] == pytest.approx(whole)


def test_samples_are_drawn_anew_and_a_function_of_groups_gets_all_of_a_prompt(evaluate: Evaluate):
    words = ("eval.samples=3", "eval.temperature=1", "reward.batch=group", "reward.path=rewards.py:of_group")
    _, samples = evaluate(*words)
    assert [(sample.row, sample.event.row.sample) for sample in samples] == [(r, s) for r in range(3) for s in range(3)]
    assert {sample.event.reward % 3 for sample in samples} == {0}, "a call has whole groups"
    assert len({sample.text for sample in samples}) > 3
    _, again = evaluate(*words, max_running=9)
    assert [sample.text for sample in again] == [sample.text for sample in samples], "they do not depend on the batch"


def test_a_sample_without_a_number_is_missing_and_the_others_count(evaluate: Evaluate):
    evaluation, samples = evaluate("reward.path=rewards.py:none_for_first")
    metrics = evaluation.metrics()
    assert (metrics["eval/held-out/missing"], metrics["eval/held-out/avg@1"]) == (1, 1)
    assert [bool(sample.event.failure) for sample in samples] == [True, False, False]


def test_an_environment_adds_to_prompt_and_response_and_gives_the_reward(evaluate: Evaluate):
    evaluation, samples = evaluate("environment.path=rewards.py:Echo", STOPS, "sampling.max_new_tokens=60")
    ended = [sample for sample in samples if not sample.event.is_truncated]
    assert ended and all(sample.event.reward == 1 for sample in ended)
    assert all(sample.text.count("[") >= 1 for sample in ended), "the observation is a part of the response"
    assert evaluation.metrics()["eval/held-out/missing"] == 0


def test_prompts_that_leave_no_room_are_missing_for_one_reason(evaluate: Evaluate, tmp_path: Path, llama: Path):
    context = Engine(llama, max_running=1).policy.context
    rows: Sequence[str] = ("ok", "a" * (context + 1), "a" * (context + 9))
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    evaluation, samples = evaluate("reward.path=rewards.py:length", f"eval.path={tmp_path / 'long.jsonl'}")
    assert evaluation.metrics()["eval/long/missing"] == 2
    reason = f"the prompt has too many tokens, the context of the policy is {context}"
    assert [sample.event.failure for sample in samples] == ["", reason, reason]


def test_the_batch_is_as_large_as_the_free_memory_and_no_larger_than_the_evaluation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llama: Path
):
    recipe = recipe_of(tmp_path, llama, "reward.path=rewards.py:length")
    assert LocalGenerator(recipe, "a", 3, None).max_running == 3
    policy = LocalGenerator(recipe, "a", 3, None).policy
    token = plan_cache(policy, 64, 8, None, AvailableMemory(10**9, 10**9, "")).page_bytes // 64
    tokens = 5 + 12
    memory = AvailableMemory(0, 7 * tokens * token + 1, "the free memory")
    assert sequences_that_fit(policy, tokens, memory) == 7
    assert sequences_that_fit(policy, tokens, AvailableMemory(0, 0, "")) == 1
    plenty = AvailableMemory(10**10, 100 * tokens * token, "the free memory")
    monkeypatch.setattr("headrace.rollout.local_evaluation.available_memory", lambda *_: plenty)
    assert LocalGenerator(recipe, "abcde", 1000, None).max_running == 100
    several = recipe_of(tmp_path, llama, "environment.path=rewards.py:Echo")
    assert LocalGenerator(several, "abcde", 1000, None).max_running == 100 * tokens // policy.context, (
        "turns may fill the context"
    )
    assert LocalGenerator(several, "abcde", 1000, 9).max_running == 9
