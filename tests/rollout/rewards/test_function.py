"""A reward function is called as its author expects: TRL's and verl's forms, with the arguments that it names."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from support.assets import GSM8K

from headrace.rollout.rewards.function import RewardFunction, Scores, WrongLength, combined
from headrace.rollout.rewards.ready import format, gsm8k, length, math
from headrace.rollout.rewards.worker import load_functions
from headrace.rollout.user_code.channel import explain

BATCH = {
    "prompts": ["p", "q"],
    "completions": ["a", [{"role": "assistant", "content": "bb"}]],
    "completion_ids": [[1], [2, 3]],
    "columns": {"answer": [1, 2], "data_source": ["d", "e"]},
    "step": 7,
}


def scores_of(function: Callable[..., Any], **columns: list[Any]) -> Scores:
    return RewardFunction("f", function, max_steps=9).score(BATCH | {"columns": BATCH["columns"] | columns})


def test_a_function_gets_only_the_arguments_that_it_names():
    assert scores_of(lambda completions: [1 for _ in completions]).rewards == [1, 1]
    assert scores_of(lambda answer, prompts: [10 * a for a in answer]).rewards == [10, 20]


def test_trl_functions_get_every_argument_of_trl():
    def reward(prompts, completions, completion_ids, **kwargs):
        assert sorted(kwargs) == ["answer", "data_source", "log_extra", "log_metric", "trainer_state"]
        state = kwargs["trainer_state"]
        kwargs["log_metric"]("accuracy", 0.25)
        kwargs["log_metric"]("accuracy", 0.75)
        kwargs["log_extra"]("source", kwargs["data_source"])
        return [state.global_step, state.max_steps]

    scores = scores_of(reward)
    assert scores.rewards == [7, 9]
    assert scores.metrics == [{"accuracy": 0.5}] * 2
    assert scores.extra == [{"source": "d"}, {"source": "e"}]


def test_a_wrong_number_of_rewards_is_an_error_that_names_the_function():
    for rewards in ([], [1], [1, 2, 3]):
        with pytest.raises(WrongLength, match=f"f returned {len(rewards)} rewards for 2"):
            scores_of(lambda completions, rewards=rewards: rewards)


def test_a_wrong_number_of_extra_values_is_an_error_that_names_them():
    with pytest.raises(WrongLength, match=r"f returned 1 values of log_extra\('x'\) for 2"):
        scores_of(lambda log_extra: log_extra("x", [1]) or [1, 1])


def test_a_column_with_the_name_of_an_argument_is_an_error_where_it_would_hide_one():
    with pytest.raises(ValueError, match="'completions'"):
        scores_of(lambda **kwargs: [1, 1], completions=["x", "y"])
    assert scores_of(lambda answer: answer, completions=["x", "y"]).rewards == [1, 2]


def test_verl_functions_are_called_per_sample_or_per_batch():
    one = scores_of(lambda data_source, solution_str, ground_truth, extra_info=None: len(solution_str) + ground_truth)
    many = scores_of(
        lambda data_sources, solution_strs, ground_truths, extra_infos, **rest: [
            len(s) + g + (d != "d") - (d != i["data_source"]) + len(rest)
            for d, s, g, i in zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
        ]
    )
    assert (one.rewards, many.rewards) == ([2, 4], [2, 5])


def test_the_text_of_a_response_of_several_turns_has_every_turn_and_what_tools_answered():
    turns = [
        {"role": "assistant", "content": '<tool_call>{"name": "calc"}</tool_call>'},
        {"role": "tool", "name": "calc", "content": "1776"},
        {"role": "assistant", "content": "It is 1776"},
    ]
    whole = '<tool_call>{"name": "calc"}</tool_call>\n1776\nIt is 1776'
    batch = {"prompts": ["p"], "completions": [turns], "completion_ids": [[1]], "columns": {}, "step": 0}
    one = RewardFunction("f", lambda solution_str: float(solution_str == whole))
    many = RewardFunction("f", lambda solution_strs: [float(solution_strs == [whole])])
    assert one.score(batch).rewards == many.score(batch).rewards == [1.0]


def test_built_in_functions_read_the_last_message_of_the_policy_and_no_answer_of_a_tool():
    call = {"role": "assistant", "content": '<tool_call>{"name": "calc"}</tool_call>'}
    answer = {"role": "tool", "name": "calc", "content": "72"}
    ends = ["No idea", "<think>It is 72</think> #### 72", "I take 71"]
    batch = {
        "prompts": ["p"] * 4,
        "completions": [*([call, answer, {"role": "assistant", "content": end}] for end in ends), [call, answer]],
        "completion_ids": [[1]] * 4,
        "columns": {"answer": ["72"] * 4},
        "step": 0,
    }
    loaded = load_functions({"gsm8k": "gsm8k", "format": "format", "marked": "marked"}, max_steps=1, timeout_s=1.0)
    given = {each.name: each.score(batch).rewards for each in loaded}
    assert given["gsm8k"] == given["format"] == [0.0, 1.0, 0.0, 0.0]
    assert RewardFunction("gsm8k", gsm8k).score(batch).rewards == [1.0, 1.0, 0.0, 1.0], "a user's own gets all turns"


def test_a_per_sample_function_may_name_columns_and_log():
    def reward(solution_str: str, answer: int, completion_ids: list[int], log_metric: Callable[..., None]) -> float:
        log_metric("tokens", len(completion_ids))
        return answer / 2

    scores = scores_of(reward)
    assert (scores.rewards, scores.metrics) == ([0.5, 1.0], [{"tokens": 1}, {"tokens": 2}])


def test_a_note_that_is_too_large_for_a_metric_is_kept_as_extra():
    scores = scores_of(lambda solution_str: (0.5, {"number": 10**400}))
    assert (scores.rewards[0], scores.metrics[0], scores.extra[0]) == (0.5, {}, {"f/number": 10**400})


@pytest.mark.parametrize("value", [(0.5, {"acc": True, "text": "x"}), {"score": 0.5, "acc": 1, "text": "x"}])
def test_a_score_with_an_info_keeps_its_numbers_as_metrics_and_the_rest_as_extra(value: Any):
    scores = scores_of(lambda solution_str: value)
    assert scores.rewards == [0.5, 0.5]
    assert (scores.metrics[0], scores.extra[0]) == ({"f/acc": 1.0}, {"f/text": "x"})


def test_a_dict_without_a_score_says_what_it_has():
    with pytest.raises(KeyError, match="without 'score'; it has 'reward'"):
        scores_of(lambda solution_str: {"reward": 1})


def test_the_sum_leaves_out_functions_without_a_reward():
    parts = [Scores([1.0, None, None], [{}] * 3, [{}] * 3), Scores([4.0, 5.0, None], [{"x": 1.0}] * 3, [{}] * 3)]
    samples = combined(["a", "b"], [2.0, 0.5], parts)
    assert [reward for reward, _ in samples] == [4.0, 2.5, None]
    assert [info["metrics"] for _, info in samples] == [{"x": 1, "a": 1, "b": 4}, {"x": 1, "b": 5}, {"x": 1}]


def test_gsm8k_accepts_each_published_solution_and_no_other_number():
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    for row in rows:
        gold = re.findall(r"#### (\-?[0-9\.\,]+)", row["answer"])[-1].replace(",", "")  # verl's strict extraction
        assert gsm8k(row["answer"], row["answer"]) == gsm8k(f"So it is ${gold}.", row["answer"]) == 1.0
        assert gsm8k(f"{gold} or {gold}1", row["answer"]) == gsm8k("", row["answer"]) == 0.0


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        ("1,000 apples", "1000", 1), ("72.0", "#### 72", 1), ("2", "12", 0), ("12", "2", 0), ("-3", "#### -3", 1),
        ("5 #### 7", "7", 1), ("7 ####", "7", 0), (".5", 0.5, 1), ("The answer is 72. #### 71", "72", 0),
    ],
)  # fmt: skip
def test_gsm8k_compares_the_last_number_exactly(response: str, truth: Any, reward: float):
    assert gsm8k(response, truth) == reward


def test_a_ground_truth_without_a_number_is_an_error():
    with pytest.raises(ValueError, match="has no number"):
        gsm8k("3", "three")


def test_a_ground_truth_with_an_exponent_is_that_number():
    assert [gsm8k(response, 1e-05) for response in ("0.00001", "1", "-5", "-05")] == [1, 0, 0, 0]


@pytest.mark.extra
def test_math_compares_values():
    pytest.importorskip("math_verify")
    assert math(r"so \boxed{\frac{1}{2}}", r"$0.5$") == math(r"$x=\frac12$", r"\frac{1}{2}") == 1.0
    assert math(r"\boxed{3}", "4") == math("no idea", "4") == 0.0


@pytest.mark.extra
@pytest.mark.parametrize(
    "gold", [r"2\sqrt{3}", r"$2\sqrt{3}$", r"so it is \boxed{2\sqrt{3}}", r"12 / \sqrt{12} #### \sqrt{12}"]
)
def test_a_ground_truth_in_latex_is_read_whole(gold: str):
    pytest.importorskip("math_verify")
    assert math(r"\boxed{2\sqrt{3}}", gold) == math(r"it is $\sqrt{12}$", gold) == 1.0
    assert math(r"\boxed{2}", gold) == math("12", gold) == 0.0


@pytest.mark.extra
@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("1,000", "1000", "1"), ("A", r"\boxed{A}", r"\boxed{B}"), (7, "7", "8"), ("5 dollars", r"\boxed{5}", "6"),
        ("5 dollars", r"\boxed{5 dollars}", r"\boxed{6 dollars}"), ("1 000", "1000", "0"), ("1 000", r"\boxed{1 000}", "1"),
        (1e-05, r"\boxed{0.00001}", "1"), ("2x", "$2x$", "2"), ("2 pi", "$2 pi$", "2"), ("10 km/h", "10", "9"),
    ],
)  # fmt: skip
def test_a_ground_truth_may_be_a_plain_answer(gold: str | float, right: str, wrong: str):
    pytest.importorskip("math_verify")
    assert (math(right, gold), math(wrong, gold)) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a\nb</think>\n4", 1), ("<think>a</think>", 0), ("4", 0), ("x <think>a</think> 4", 0),
        ("<think>a<think>b</think> 4", 0),
    ],
)  # fmt: skip
def test_format_asks_for_one_thought_and_an_answer(text: str, reward: float):
    assert format(text) == reward


def test_length_is_minus_thousands_of_tokens():
    assert length([[1] * 500, []]) == [-0.5, 0.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda solution_str: "right", "f returned 'right', which is not a number"),
        (lambda solution_str: {"score": [1]}, r"f returned {'score': \[1\]}, which is not a number"),
        (lambda completions: [object()] * 2, "f returned <object .*, which is not a number"),
        (lambda completions: 1.0, "f returned 1.0 for 2 completions, not a list"),
        (lambda completions: None, "f returned None instead of a list of rewards"),
        (lambda completions: "x" * 200, r"f returned 'x+\.\.\. for 2 completions, not a list"),
    ],
)
def test_a_value_that_is_no_reward_names_the_function_and_itself(function, message):
    with pytest.raises(TypeError, match=message) as told:
        scores_of(function)
    assert "(function.py" not in explain(told.value)
