"""The alarms name the right cause early on recorded runs that collapse, and are silent on those that learn.

`recorded.json` has the metrics of each step: of `headrace` runs, and of loops in one process whose rows have a fixed age. `halved` is the
first step at which the mean reward of three steps is below half of the best mean of five before it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.launch.config.load import read_recipe
from headrace.trainer.alarms.collapse import CollapseWatch
from headrace.trainer.alarms.run_alarms import REPEATED_AFTER, RunAlarms

RUNS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("recorded.json").read_text())
STEP: Mapping[str, object] = {
    "kl/age/1": 0.01, "staleness/kl": 0.01, "staleness/token_mean": 1.0, "is/ess": 0.98, "actor/grad_norm": 0.5,
    "actor/entropy": 0.4, "reward/mean": 0.3,
}  # fmt: skip
STALE = {"staleness/kl": 1.4, "staleness/token_mean": 8.0, "is/ess": 0.3}


def watch_of(**settings: object) -> RunAlarms:
    recipe = read_recipe(None, [f"{name.replace('__', '.')}={value}" for name, value in settings.items()])
    return RunAlarms(recipe, [CollapseWatch(recipe)])


def told(watch: RunAlarms, *steps: Mapping[str, object], first: int = 0) -> list[tuple[int, str]]:
    """The steps at which the watch tells an alarm, each with its text."""
    found: list[tuple[int, str]] = []
    for number, changes in enumerate(steps, first):
        watch.step(number, {**STEP, **changes})
        found += [(number, each.text) for each in watch.told(checkpoint=4)]
    return found


def steps_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a recorded run; a metric that a step does not have is null there."""
    rows = [dict(zip(run["columns"], values, strict=True)) for values in zip(*run["columns"].values(), strict=True)]
    return [{name: value for name, value in row.items() if value is not None} | {"kl/age/1": 0.0} for row in rows]


def alarms_of(run: dict[str, Any]) -> list[tuple[int, str]]:
    """(step, cause) of each alarm of a recorded run."""
    recipe = read_recipe(None, run["settings"])
    watch = RunAlarms(recipe)
    return [(step, name) for step, row in enumerate(steps_of(run)) for name in watch.step(step, row)]


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run["cause"]])
def test_a_run_that_collapses_is_told_its_cause_before_its_reward_has_halved(name: str):
    run = RUNS[name]
    alarms = alarms_of(run)
    assert {cause for _, cause in alarms} == {f"alarm/{run['cause']}"}
    assert alarms[0][0] < run["halved"] or run["cause"] == "chat_template" and alarms[0][0] < 5


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if not run["cause"]])
def test_a_run_that_learns_has_no_alarm(name: str):
    assert alarms_of(RUNS[name]) == []


def test_the_rate_is_named_with_the_evidence():
    watch = watch_of(optimizer__lr=9e-3)
    ((step, text),) = told(watch, {}, {}, {"staleness/kl": 0.9, "actor/grad_norm": 7.0})
    assert step == 2 and text == (
        "learning is about to collapse: the KL divergence from one version to the next is 0.9 per token (a healthy run's is below"
        " 0.5), the gradient's norm is 14 times its median: optimizer.lr=0.009 is too high; try a tenth"
    )


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({"algorithm__loss": "reinforce", "algorithm__proximal": "rollout"}, "set algorithm.loss=clip, or queue.max_staleness=2"),
        ({"algorithm__importance_sampling_cap": 1e9}, "algorithm.importance_sampling_cap=1e+09 bounds no weight; set it to 2, or queue"),
        ({"algorithm__importance_sampling": "token_truncate"}, ": set algorithm.importance_sampling=token_dppo, or queue.max_"),
        ({}, ": set queue.max_staleness=2"),
        ({"algorithm__proximal": "rollout"}, ": set queue.max_staleness=2"),
    ],
)  # fmt: skip
def test_the_correction_that_the_settings_lack_is_named(settings: dict[str, object], cure: str):
    ((step, text),) = told(watch_of(**settings), *[STALE] * 4)
    assert step == 2 and "the tokens are 8.0 versions old, their KL divergence is 1.4" in text and cure in text


def test_a_trust_region_bears_a_larger_divergence_of_old_tokens():
    between = {"staleness/token_mean": 8.0, "staleness/kl": 0.5, "is/ess": 0.6}
    assert told(watch_of(), *[between] * 5) == []
    assert told(watch_of(algorithm__proximal="rollout"), *[between] * 5) == []
    assert told(watch_of(algorithm__importance_sampling="token_truncate"), *[between] * 5)


def test_old_tokens_near_the_policy_and_a_single_odd_step_are_no_alarm():
    near = {"staleness/token_mean": 8.0, "staleness/kl": 0.1, "is/ess": 0.9}
    assert told(watch_of(), *[near] * 3, STALE, *[near] * 2, STALE, near) == []
    assert told(watch_of(), *[STALE | {"is/ess": 0.9}] * 5) == [], "their weights are near each other"


def test_a_mismatch_is_named_with_the_places_where_it_is():
    broken = {"mismatch/kl": 0.3, "kl/depth/0-15": 0.01, "kl/depth/16-63": 0.02, "kl/depth/64-255": 0.9}
    ((step, text),) = told(watch_of(), {"mismatch/kl": 1e-3}, broken, broken, broken)
    assert step == 2 and "most of it at the places 64-255 of a response: `headrace numerics` shows where" in text


@pytest.mark.parametrize(
    ("template", "cause"), [("", "they are plain text"), ("{{ x }}", "data.chat_template is that of another model")]
)
def test_prompts_without_the_models_template_are_named_at_the_second_step(template: str, cause: str):
    bare = {"prompt/turn_frac": 0.0}
    ((step, text),) = told(watch_of(data__chat_template=template), bare, bare, bare)
    assert step == 1 and f"{cause}; set data.chat_template=tokenizer" in text
    for turns in ({"prompt/turn_frac": 1.0}, {"prompt/turn_frac": 0.01}, {}):
        assert told(watch_of(data__chat_template=template), *[turns] * 5) == []


def test_an_alarm_is_told_once_and_again_after_a_pause():
    high = {"staleness/kl": 0.9}
    steps = [high, {}, high, high, *[{}] * REPEATED_AFTER, high]
    assert [step for step, _ in told(watch_of(), *steps)] == [0, 4 + REPEATED_AFTER]


def test_a_trainer_that_started_again_goes_on_where_the_one_before_was():
    before, after = watch_of(), watch_of()
    told(before, STALE, STALE)
    for number in range(2):
        after.step(number, {**STEP, **STALE})
    assert told(before, STALE, first=2) == told(after, STALE, first=2) != []


def test_a_run_that_an_alarm_ends_is_told_of_its_checkpoint_at_each_step_with_one():
    texts = [text for _, text in told(watch_of(run__on_collapse="stop"), *[{"staleness/kl": 0.9}] * 2)]
    assert len(texts) == 2 and texts[0].endswith("ends the run, and its last checkpoint is that of step 4")


def test_the_steps_of_a_trainer_that_counts_no_tokens_have_no_alarm():
    watch = watch_of()
    for step in range(5):
        assert (
            watch.step(step, {"is/ess": 0.0, "staleness/kl": 9.0, "prompt/turn_frac": 0.0, "actor/grad_norm": 0.0})
            == {}
        )
