"""Every reward function that a page shows tells a right response from a wrong one, with text prompts and with chat prompts."""

import ast
import asyncio
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.http_server import serving
from support.source_tree import ROOT

from headrace.comm.plugins import load_object
from headrace.rollout.rewards.function import RewardFunction
from headrace.rollout.rewards.sandbox import SandboxError

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
THOUGHT = "<think>2 and 2</think> <answer>4</answer>"
ANSWERS = {"answer": "4"}
RESPONSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "right": ("4", "5", ANSWERS),
    "score": ("4", "5", ANSWERS),
    "legs.score": ("<answer>4</answer>", "<answer>5</answer>", {"task": 0}),
    "compute_score": ("4", "5", {"data_source": "sums", "ground_truth": "4"}),
    "exact": ("4", "5", ANSWERS),
    "form": (THOUGHT, "4", {}),
    "correct": (THOUGHT, "4", ANSWERS),
    "brevity": ("4", "5", ANSWERS),
    "graded": ("4", "5", ANSWERS),
    "shortest": ("4", "5", ANSWERS),
    "passed": ("```python\nx = 4\n```", "none", {"tests": ["assert x == 4"]}),
    "passes": ("x = 4", "x = 5", {"tests": "assert x == 4"}),
}
"""A right and a wrong response for each function, with the columns of their row."""


class Tasks:
    """A data set of reasoning-gym with one task."""

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"question": "2 + 2 ="}

    def score_answer(self, answer: str, entry: dict[str, str]) -> float:
        return float(answer == "4")


@cache
def examples() -> dict[tuple[str, str], str]:
    """Page and name of each reward function that the pages define, with the source that it needs."""
    return {
        (page.stem, name): source
        for page in PAGES
        for block in BLOCK.findall(page.read_text())
        for name, source in functions_of(block)
    }


def functions_of(block: str) -> Iterator[tuple[str, str]]:
    """The reward functions of a block, with its source but the starts of runs. A block with an ellipsis or a prompt is not a program."""
    try:
        tree = ast.parse(block)
    except SyntaxError:
        return
    program = ast.Module([node for node in tree.body if not is_of_a_run(node)], [])
    for node in program.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
            if names & {"completions", "solution_str", "solution_strs"}:
                own = f"legs.{node.name}" if "reasoning_gym" in block else node.name
                yield own, ast.unparse(program)


def is_of_a_run(node: ast.stmt) -> bool:
    """Whether a statement starts a run, or shows what one has left."""
    return isinstance(node, ast.Expr) or "headrace.train(" in ast.unparse(node)


def batch_of(response: str, row: dict[str, Any], *, is_chat: bool) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "2 + 2 ="}] if is_chat else "2 + 2 ="
    completion = [{"role": "assistant", "content": response}] if is_chat else response
    columns = {name: [value] for name, value in row.items()}
    return {"prompts": [prompt], "completions": [completion], "completion_ids": [[1]], "columns": columns, "step": 0}


def test_every_reward_function_of_the_pages_has_responses_here():
    assert {name for _, name in examples()} == RESPONSES.keys()
    assert {page for page, _ in examples()} >= {"README", "getting-started", "rewards", "from-trl", "from-verl", "data"}


@pytest.mark.parametrize(("page", "name"), examples())
def test_an_example_scores_text_and_chat_alike(page: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=lambda *_, **settings: Tasks()))
    file = tmp_path / "rewards.py"
    file.write_text(examples()[page, name])
    function = RewardFunction(name, load_object("reward.path", f"{file}:{name.rpartition('.')[2]}"))
    right, wrong, row = RESPONSES[name]
    with serving(lambda number, body: (200, {"score": float(body["text"] == "4")})) as server:
        monkeypatch.setenv("GRADER_URL", server.url)
        for is_chat in (False, True):
            batches = [batch_of(response, row, is_chat=is_chat) for response in (right, wrong)]
            try:
                found = [rewards_of(function, batch) for batch in batches]
            except SandboxError as error:
                pytest.skip(f"this host starts no program of a policy: {error}")
            assert found[0][0] > found[1][0] == 0, (is_chat, found)


def rewards_of(function: RewardFunction, batch: dict[str, Any]) -> list[Any]:
    return (asyncio.run(function.score_async(batch)) if function.is_async else function.score(batch)).rewards
