"""Rewards and tools that cannot be called are refused by their source, which is not executed."""

from pathlib import Path
from typing import Any

import pytest

from headrace.comm.errors import SettingError
from headrace.comm.plugins import load_object
from headrace.comm.recipe import EnvironmentSettings, RewardSettings
from headrace.launch.config.checks.signatures import check_reward_arguments, check_tools
from headrace.rollout.rewards.function import RewardFunction
from headrace.rollout.rewards.ready import READY

BOOM = "raise RuntimeError('executed')\n"
ROW = {"prompt": "1 + 1", "answer": "2"}


def checked(tmp_path: Path, source: str, *rows: dict[str, Any]) -> list[str]:
    (tmp_path / "rewards.py").write_text(BOOM + source)
    settings = RewardSettings(path=f"{tmp_path / 'rewards.py'}:score")
    return check_reward_arguments(settings, rows or (ROW,), "data.path")


@pytest.mark.parametrize(
    ("source", "row", "message"),
    [
        ("def score(completions, target): ...", ROW, "needs 'target', .*; the first row of data.path has answer$"),
        ("def score(completions, anwser): ...", ROW, "needs 'anwser', .*; the nearest is 'answer'"),
        ("async def score(solution_str, *, task): ...", ROW, "needs 'task'"),
        ("def score(ground_truth): ...", ROW, "needs 'ground_truth', .*it is given to a function that takes solution_str"),
        ("def score(solution_str, ground_truth): ...", {"prompt": "x", "a": 1, "b": 2}, "takes a ground truth, .* has a, b"),
        ("def score(solution_strs, ground_truths, **kwargs): ...", {"prompt": "x"}, "takes a ground truth, .* has no column but"),
        ("def score(solution_str, answers): ...", ROW, "needs 'answers'"),
        ("def score(answer, /): ...", ROW, "takes 'answer' by position"),
        ("def score(**kwargs): ...", {"prompt": "x", "completions": 1}, "takes every argument, but the column 'completions' is another one of rewards"),
        ("def score(prompt, completions): ...", ROW, "needs 'prompt', .*; the nearest is 'prompts'"),
    ],
)  # fmt: skip
def test_a_reward_whose_arguments_no_row_has_is_refused_with_the_columns_there_are(tmp_path, source, row, message):
    with pytest.raises(SettingError, match=f"reward.path: score {message}"):
        checked(tmp_path, source, row)


CALLABLE = [
    "def score(completions, answer): return [1.0] * len(completions)",
    "def score(solution_str, answer, target=None): return 1.0",
    "def score(solution_str, ground_truth, extra_info, data_source, prompts): return 1.0",
    "def score(solution_strs, ground_truths, **kwargs): return [1.0] * len(solution_strs)",
    "def score(prompts, completions, completion_ids, **columns): return [1.0] * len(prompts)",
    "def score(completions, trainer_state, log_metric, log_extra): return [1.0] * len(completions)",
    "def score(solution_str, **kwargs): return 1.0",
]


@pytest.mark.parametrize("source", CALLABLE)
def test_a_reward_that_can_be_called_passes(tmp_path, source):
    assert checked(tmp_path, source) == []
    (tmp_path / "defined.py").write_text(source)
    function = load_object("reward.path", f"{tmp_path / 'defined.py'}:score")
    batch = {"prompts": ["x"], "completions": ["y"], "completion_ids": [[1]], "columns": {"answer": ["2"]}}
    assert RewardFunction("score", function).score(batch).rewards == [1.0]


@pytest.mark.parametrize(
    "source",
    [
        "import functools\n@functools.cache\ndef score(target): ...",
        "from elsewhere import score",
        "score = print",
        "class score:\n    def __call__(self, target): ...",
        "def score(target): ...\nscore = wrapped(score)",
        "if True:\n    def score(target): ...",
    ],
)
def test_a_function_whose_arguments_the_source_does_not_show_is_left_to_its_process(tmp_path, source):
    assert checked(tmp_path, source) == []


def test_a_column_that_only_some_sets_have_is_a_warning(tmp_path):
    (warning,) = checked(tmp_path, "def score(solution_str, answer): ...", ROW, {"prompt": "x", "solution": "2"})
    assert "score needs 'answer'" in warning and warning.endswith("has solution")


@pytest.mark.parametrize("name", sorted(READY))
def test_a_ready_reward_names_the_column_that_it_needs(name):
    settings = RewardSettings(path=name)
    assert check_reward_arguments(settings, [ROW], "data.path") == []
    if name in ("math", "gsm8k"):
        with pytest.raises(SettingError, match="takes a ground truth, from a column ground_truth, answer or solution"):
            check_reward_arguments(settings, [{"prompt": "x"}], "data.path")


TOOL = '''def search(query: str, most: int = 3):
    """Searches.

    Args:
        query: the words
        most: results
    """
'''


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("query: str", "query", "the tool search has no type hint for its argument 'query'"),
        ("most: int = 3", "*, most=3", "the tool search has no type hint for its argument 'most'"),
        ("        most: results\n", "", "the tool search does not describe its argument 'most': .* `most: ...` below `Args:`"),
        ("    Args:\n", "", "the tool search does not describe its argument 'query'"),
    ],
)  # fmt: skip
def test_a_tool_that_the_policy_cannot_be_told_about_is_refused(tmp_path, old, new, message):
    file = tmp_path / "tools.py"
    file.write_text(BOOM + TOOL)
    check_tools(EnvironmentSettings(tools=(f"{file}:search",)))
    file.write_text(BOOM + TOOL.replace(old, new))
    with pytest.raises(SettingError, match=f"environment.tools: {message}"):
        check_tools(EnvironmentSettings(tools=(f"{file}:search",)))


def test_the_methods_of_an_environment_without_step_are_tools(tmp_path):
    file = tmp_path / "rooms.py"
    source = "class Room:\n    def reset(self, **row): ...\n    def _own(self, x): ...\n    def look(self, at): ...\n"
    file.write_text(source)
    with pytest.raises(SettingError, match="environment.path: the tool look has no docstring"):
        check_tools(EnvironmentSettings(path=f"{file}:Room"))
    file.write_text(source + "    def step(self, completion): ...\n")
    check_tools(EnvironmentSettings(path=f"{file}:Room"))
