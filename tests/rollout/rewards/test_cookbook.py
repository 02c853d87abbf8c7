"""The functions of the page's cookbook give the rewards that their texts describe."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.http_server import serving
from support.source_tree import ROOT

from headrace.comm.plugins import load_object
from headrace.rollout.rewards.function import RewardFunction
from headrace.rollout.rewards.sandbox import SandboxError

PAGE = (ROOT / "docs" / "use" / "rewards.md").read_text()
COOKBOOK = PAGE.partition("\n## Cookbook\n")[2].partition("\n## ")[0]
THOUGHT = "<think>2 and 2</think> <answer>4</answer>"


FromPage = Callable[[str], RewardFunction]


@pytest.fixture
def from_page(tmp_path: Path) -> FromPage:
    """The function of the block that defines it, read as a run reads it."""

    def read(name: str) -> RewardFunction:
        file = tmp_path / "rewards.py"
        file.write_text(block_with(name))
        return RewardFunction(name, load_object("reward.path", f"{file}:{name}"))

    return read


def block_with(name: str) -> str:
    (text,) = (
        block
        for block in re.findall(r"^```python\n(.*?)^```", COOKBOOK, re.MULTILINE | re.DOTALL)
        if f"def {name}(" in block
    )
    return text


def batch_of(*responses: str, lengths: tuple[int, ...] = (), **columns: list[Any]) -> dict[str, Any]:
    ids = [[0] * length for length in lengths or [1] * len(responses)]
    prompts = ["p", *["q"] * (len(responses) - 1)]
    return {"prompts": prompts, "completions": [*responses], "completion_ids": ids, "columns": columns, "step": 0}


@pytest.mark.parametrize(
    ("name", "response", "reward"),
    [
        ("exact", " 4\n", 1.0),
        ("exact", "It is 4", 0.0),
        ("form", THOUGHT, 1.0),
        ("form", "<answer>4</answer>", 0.0),
        ("correct", THOUGHT, 1.0),
        ("correct", THOUGHT.replace("4", "5"), 0.0),
        ("correct", "4", 0.0),
    ],
)
def test_a_response_is_scored_by_its_answer_and_its_form(from_page: FromPage, name: str, response: str, reward: float):
    assert from_page(name).score(batch_of(response, answer=["4"])).rewards == [reward]


def test_only_a_right_response_gains_by_being_short(from_page: FromPage):
    batch = batch_of("4", "so 4", "much 4", "", lengths=(1, 100, 1000, 0), answer=["4"] * 4)
    assert from_page("brevity").score(batch).rewards == [0.9975, 0.75, 0.5, 0.0]


def test_the_shortest_right_response_of_each_prompt_gets_more(from_page: FromPage):
    batch = batch_of("4", "4", "is 4", "5", lengths=(9, 3, 5, 1), answer=["4"] * 4)
    assert from_page("shortest").score(batch).rewards == [1.5, 1.5, 1.0, 0.0]


def test_code_gets_the_share_of_its_tests_that_pass(from_page: FromPage):
    code = "Here:\n```python\ndef double(n):\n    return n + 2\n```\n"
    batch = batch_of(code, "no code", tests=[["assert double(2) == 4", "assert double(3) == 6"]] * 2)
    try:
        rewards = from_page("passed").score(batch).rewards
    except SandboxError as error:
        pytest.skip(f"this host starts no program of a policy: {error}")
    assert rewards == [0.5, 0.0]


def test_a_server_grades_and_its_absence_is_no_reward(from_page: FromPage, monkeypatch: pytest.MonkeyPatch):
    graded = from_page("graded")
    with serving(lambda number, body: (200, {"score": 0.5 if body["expected"] == "4" else 0})) as server:
        monkeypatch.setenv("GRADER_URL", server.url)
        monkeypatch.setenv("GRADER_KEY", "a key")
        assert asyncio.run(graded.score_async(batch_of("x", answer=["4"]))).rewards == [0.5]
        assert server.headers[0]["Authorization"] == "a key"
    assert asyncio.run(graded.score_async(batch_of("x", answer=["4"]))).rewards == [None]
