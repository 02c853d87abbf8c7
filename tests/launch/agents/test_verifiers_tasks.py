"""A real taskset and a harness of two turns, against a policy that answers as the test says."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.foreign_servers import TASKSET
from support.http_server import serving

from headrace.comm.errors import SettingError
from headrace.launch.agents.verifiers_tasks import VerifiersTasks

pytest.importorskip("verifiers")

pytestmark = [pytest.mark.extra, pytest.mark.filterwarnings("ignore")]  # of verifiers' packages
HERE = {"agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VerifiersTasks:
    (tmp_path / "product_tasks.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    return VerifiersTasks("product-tasks", HERE)


def test_rows_name_the_tasks(tasks: VerifiersTasks):
    rows = list(tasks.rows(None))
    assert len(rows) == 512 and [*tasks.rows(2)] == rows[:2]
    assert rows[7] == {"prompt": tasks.task(rows[7]).data.prompt, "task": 7}
    assert tasks.task(rows[3]).data.idx == 3 and tasks.task(rows[7]).data.idx == 7


@pytest.mark.parametrize("row", [{}, {"task": "1"}, {"task": True}, {"task": 512}, {"task": -1}])
def test_a_row_without_a_task_is_refused(tasks: VerifiersTasks, row: dict[str, Any]):
    with pytest.raises(SettingError, match="^data.path: "):
        tasks.task(row)


def test_a_taskset_that_is_not_there_and_settings_that_do_not_fit_are_told(tasks: VerifiersTasks):
    with pytest.raises(SettingError, match="verifiers:no-such-taskset cannot be loaded: .*not found"):
        VerifiersTasks("no-such-taskset", HERE)
    with pytest.raises(SettingError, match="verifiers:product-tasks cannot be loaded: .*max_turns"):
        VerifiersTasks("product-tasks", {"agent": {"max_turns": "many"}})


def played(tasks: VerifiersTasks, answers: Sequence[Any]) -> tuple[dict[str, Any], list[Any], list[dict[str, str]]]:
    """The outcome of the first task whose policy gives these answers (a text, or a status), its calls and their headers."""

    def answer(number: int, body: Any) -> tuple[int, Any]:
        if isinstance(answers[number], int):
            return answers[number], {
                "error": {"message": "the policy is busy", "type": "x", "param": None, "code": None}
            }
        message = {"role": "assistant", "content": answers[number]}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        return 200, {"id": "1", "object": "chat.completion", "created": 0, "model": "run", "choices": [choice]}

    async def play(url: str) -> dict[str, Any]:
        claimed = {
            "id": "7",
            "row": {"task": 0},
            "base_url": f"{url}/v1",
            "api_key": "of-the-conversation",
            "model": "run",
        }
        async with tasks.player() as player:
            return await player.play(claimed)

    with serving(answer) as policy:
        outcome = asyncio.run(play(policy.url))
    return outcome, policy.bodies, policy.headers


def test_a_harness_plays_two_turns_and_its_trace_has_the_reward(tasks: VerifiersTasks):
    task = tasks.task({"task": 0})
    product = task.data.prompt.split()[1]
    outcome, calls, headers = played(tasks, [product, task.data.answer])
    assert outcome == {"reward": 1.0}
    assert [len(call["messages"]) for call in calls] == [1, 3] and {call["model"] for call in calls} == {"run"}
    assert calls[1]["messages"][1]["content"] == product
    assert "temperature" not in calls[0], "the run's own sampling"
    given = [{name.lower(): value for name, value in each.items()}["authorization"] for each in headers]
    assert given == ["Bearer of-the-conversation"] * 2
    assert played(tasks, ["12"])[0] == {"reward": 0.0}


def test_a_call_that_fails_is_a_failed_trajectory_and_no_reward_of_zero(tasks: VerifiersTasks):
    outcome, *_ = played(tasks, [400])
    assert "the policy is busy" in outcome["failure"] and "reward" not in outcome
