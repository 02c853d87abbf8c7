"""Warnings of a run: each comes in a sick history, once, with a link to the page; in a healthy one none comes."""

import re
from collections.abc import Iterator, Mapping
from itertools import chain, repeat

import pytest

from headrace.comm.recipe import Recipe
from headrace.launch.config.load import read_recipe
from headrace.trainer.alarms.equal_rewards import EqualRewards
from headrace.trainer.alarms.full_cache import FullCache
from headrace.trainer.alarms.run_alarms import RunAlarms
from headrace.trainer.alarms.staleness_bound import StalenessBound
from headrace.trainer.alarms.unused_tools import UnusedTools
from headrace.trainer.alarms.watch import STEPS

Step = Mapping[str, object]
HEALTHY: Step = {
    "reward/mean": 0.3, "reward/min": 0.0, "reward/max": 1.0, "group/zero_std_frac": 0.56, "response_length/clip_ratio": 0.08,
    "staleness/hist": {"1": 72, "2": 56}, "idle/actor": 0.04, "idle/rollout": 0.3, "tokens/generated": 1500.0, "tools/called_frac": 0.7,
}  # fmt: skip
"""Figures of a step of the quickstart."""
SAME: Step = {"group/zero_std_frac": 1.0}
CUT: Step = {"response_length/clip_ratio": 0.95}
UNUSED: Step = {"tools/called_frac": 0.0}
BOUND: Step = {"staleness/hist": {"1": 40, "2": 88}, "idle/actor": 0.4, "idle/rollout": 0.3}
THRASHING: Step = {"tokens/recomputed/full_cache": 600.0}
WORDS = ("queue.max_staleness=2", "sampling.max_new_tokens=32")
SICK = {
    "equal_rewards": SAME, "cut_responses": CUT, "unused_tools": UNUSED, "staleness_bound": BOUND, "full_cache": THRASHING,
}  # fmt: skip


def recipe_of(*words: str) -> Recipe:
    return read_recipe(None, [*WORDS, *words])


def told(alarms: RunAlarms, *steps: Step, first: int = 0) -> Iterator[tuple[int, str]]:
    """The steps at which the alarms tell something, each with the line."""
    for number, changes in enumerate(steps, first):
        alarms.step(number, {**HEALTHY, **changes})
        yield from ((number, each.line) for each in alarms.told(checkpoint=0))


@pytest.mark.parametrize(("cause", "sick"), SICK.items())
def test_a_sick_run_is_warned_once_after_some_steps_with_a_link_to_the_page(cause: str, sick: Step):
    alarms = RunAlarms(recipe_of())
    ((step, line),) = told(alarms, *chain(repeat(sick, 30), [{}] * 30, repeat(sick, 30)))
    assert STEPS - 1 <= step < 10 and line.startswith("warning: ")
    assert re.search(r" \(docs/use/warnings\.md#[\w-]+\)$", line), "tests/test_documents.py looks for the headings"
    assert list(alarms.warnings) == [cause] and alarms.warnings[cause].startswith(f"at step {step + 1}: ")
    assert alarms.last_collapse == "" and not alarms.told(0), "the hub ends no run for it"


@pytest.mark.parametrize("cause", SICK)
def test_a_trainer_that_started_again_repeats_no_warning_and_counts_on(cause: str):
    steps = [{**HEALTHY, **SICK[cause]}] * 40
    before = RunAlarms(recipe_of())
    ((at, _),) = told(before, *steps)
    for first in (at - 1, at + 3):
        after = RunAlarms(recipe_of())
        for number in range(first):
            after.step(number, steps[number])
        assert [step for step, _ in told(after, *steps[first:], first=first)] == ([at] if first < at else [])
        assert after.warnings == before.warnings


def test_a_healthy_run_has_no_warning_nor_has_one_that_is_sick_for_a_few_steps():
    few = list(chain.from_iterable([*repeat(sick, STEPS - 1), HEALTHY] for sick in SICK.values()))
    assert [*told(RunAlarms(recipe_of()), *repeat(HEALTHY, 50), *few)] == []


def test_tokens_that_are_computed_again_count_over_ten_steps_since_reports_of_them_come_now_and_then():
    recipe = recipe_of()

    def count(again: float, *, every: int) -> list[int]:
        steps = [{"tokens/recomputed/full_cache": again} if step % every == 0 else {} for step in range(30)]
        return [step for step, _ in told(RunAlarms(recipe, [FullCache(recipe)]), *steps)]

    assert count(2000, every=5) == [9]
    assert count(700, every=5) == count(370, every=1) == []


def test_a_smaller_max_running_is_advised_only_where_the_cache_does_not_shrink_with_it():
    for words, is_advised in (([], False), (["generator.kv_gb=0.5"], True)):
        recipe = recipe_of(*words)
        ((_, line),) = told(RunAlarms(recipe, [FullCache(recipe)]), *repeat(THRASHING, 10))
        assert ("generator.max_running below" in line) is is_advised and "generator.kv_gb" in line


def test_an_emulated_run_is_not_judged():
    alarms = RunAlarms(read_recipe(None, ["rollout.engine=emulated", "trainer.engine=emulated"]))
    assert [*told(alarms, *repeat({**SAME, **CUT, **THRASHING}, 20))] == []


@pytest.mark.parametrize(
    ("rewards", "text"),
    [
        ((0.0, 0.0, 0.0), "namely 0: read the samples"),
        ((0.0, 0.004, 1.0), "namely 0: read the samples"),  # one response of a step is right
        ((1.0, 1.0, 1.0), "namely 1: the policy has learnt these prompts, unless the reward is 1 whatever it writes"),
        ((0.0, 0.99, 1.0), "namely 1: the policy has learnt these prompts; end the run"),
        ((0.0, 1.98, 2.0), "namely 2: if that is the best reward that there is, the policy has learnt these prompts"),
        ((-1.0, -0.98, 1.0), "namely -1: read the samples"),
        ((0.5, 0.5, 0.5), "namely 0.5, whatever the policy writes"),
        ((-1.0, -1.0, -1.0), "namely -1, whatever the policy writes"),
        ((0.0, 0.5, 1.0), "but not those of different groups"),
        ((-1.0, 0.0, 1.0), "but not those of different groups"),
    ],
)
def test_equal_rewards_are_told_with_their_value_and_what_to_do(rewards: tuple[float, float, float], text: str):
    step = {**SAME, **dict(zip(("reward/min", "reward/mean", "reward/max"), rewards, strict=True))}
    ((_, line),) = told(RunAlarms(recipe_of()), *repeat(step, STEPS))
    assert text in line


@pytest.mark.parametrize(
    ("best", "text"), [(1.0, "learnt these prompts; end the run"), (2.0, "namely 2: if that is the best")]
)
def test_a_reward_that_has_risen_to_the_same_for_all_is_told_as_learnt(best: float, text: str):
    solved = {**SAME, "reward/min": best, "reward/mean": best, "reward/max": best}
    rising = {"reward/mean": best / 2, "reward/max": best}
    recipe = recipe_of()
    alarms = RunAlarms(recipe, [EqualRewards(recipe)])
    ((step, line),) = told(alarms, *repeat(rising, 3), *repeat(solved, 20))
    assert step == 3 + STEPS - 1 and text in line and "whatever" not in line


def test_steps_of_few_groups_are_judged_together():
    recipe = recipe_of("batch.prompts_per_step=2")
    few = chain.from_iterable([*repeat(SAME, 20), {}] for _ in range(5))  # one group of 41 teaches
    assert [*told(RunAlarms(recipe, [EqualRewards(recipe)]), *few)] == []
    ((step, line),) = told(RunAlarms(recipe, [EqualRewards(recipe)]), *repeat(SAME, 40))
    assert step == 29 and "each of the last 30 steps" in line


def test_advantages_over_a_whole_step_need_rewards_that_are_all_equal():
    for advantage in ("reinforce_plus_plus", "gae"):
        recipe = recipe_of(f"algorithm.advantage={advantage}", "batch.samples_per_prompt=1")
        equal = {**SAME, "reward/min": 0.0, "reward/max": 0.0, "reward/mean": 0.0}
        for sick, number in ((SAME, 0), (equal, 1)):
            assert len([*told(RunAlarms(recipe, [EqualRewards(recipe)]), *repeat(sick, 20))]) == number


def test_a_run_of_one_sample_of_each_prompt_which_the_start_warns_of_is_not_warned_again():
    recipe = recipe_of("batch.samples_per_prompt=1")
    assert [*told(RunAlarms(recipe, [EqualRewards(recipe)]), *repeat(SAME, 20))] == []


def test_tools_are_unused_only_if_no_response_of_the_run_has_called_one():
    recipe = recipe_of("batch.prompts_per_step=4", "batch.samples_per_prompt=8")

    def count(*steps: Step) -> list[int]:
        return [step for step, _ in told(RunAlarms(recipe, [UnusedTools(recipe)]), *steps)]

    assert count(*repeat(UNUSED, 30)) == [9], "300 responses are 9.4 steps of 32"
    assert count(*repeat(UNUSED, 8), {"tools/called_frac": 0.03}, *repeat(UNUSED, 30)) == []
    without = {name: value for name, value in HEALTHY.items() if not name.startswith("tools/")}
    alarms = RunAlarms(recipe, [UnusedTools(recipe)])
    assert [alarms.step(step, without) for step in range(30)] == [{}] * 30, "a run without tools"


@pytest.mark.parametrize(
    "changes",
    [
        {"idle/actor": 0.1},  # the trainer is busy
        {"idle/rollout": 0.1},  # the rollouts are
        {"staleness/hist": {"1": 100, "2": 28}},  # few rows are as old as the bound
    ],
)
def test_rows_at_the_bound_are_no_fault_while_one_side_is_busy(changes: Step):
    recipe = recipe_of()
    alarms = RunAlarms(recipe, [StalenessBound(recipe)])
    assert [*told(alarms, *repeat({**BOUND, **changes}, 30))] == []


@pytest.mark.parametrize("words", ["queue.max_staleness=null", "queue.max_staleness=0"])
def test_a_run_without_a_bound_and_one_whose_sides_take_turns_have_no_warning_of_it(words: str):
    recipe = recipe_of(words)
    assert [
        *told(RunAlarms(recipe, [StalenessBound(recipe)]), *repeat({**BOUND, "staleness/hist": {"0": 9}}, 30))
    ] == []
