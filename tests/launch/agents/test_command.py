"""The command that plays tasks against a running job: its words, and its workers."""

import asyncio
from collections.abc import Mapping
from typing import Any, Self

import pytest
from support.http_server import serving

from headrace.comm.errors import SettingError
from headrace.launch.agents.claims import Claims
from headrace.launch.agents.command import Crew, main


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["other:tasks", "run"], "other:tasks: name a taskset as verifiers:TASKSET"),
        (["verifiers:tasks"], "agent: name the taskset and the run"),
        (["verifiers:tasks", "no-such-folder"], "no-such-folder has no serve.json"),
        (["verifiers:tasks", "run", "--workers", "0"], "--workers and --limit must be above 0"),
        (["verifiers:tasks", "--rows", "a=1", "a.b=2"], "a.b: a is a value already"),
        (["verifiers:tasks", "--rows", "a=[1"], "a: '[1' is not YAML"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]):
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"headrace: error: {problem}")


class Scripted:
    """Tasks whose outcome is in their row."""

    def player(self) -> "Scripted":
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None: ...

    async def play(self, claimed: Mapping[str, Any]) -> dict[str, Any]:
        if "hangs" in claimed["row"]:
            await asyncio.sleep(1000)
        return claimed["row"]


def worked(*rows: Any, num_workers: int = 1) -> tuple[list[Any], Crew]:
    """The ends that a front gets which has these rows, and the workers that have played them."""
    left = list(rows)
    ends: list[Any] = []

    def answer(number: int, body: Any) -> tuple[int, Any]:
        if body is None:
            return 404, {}  # the state of a conversation
        if body:
            ends.append(body)
            return 200, {}
        return (200, {"id": str(number), "row": left.pop(0), "idle_timeout_s": 0.1}) if left else (410, {})

    with serving(answer) as front:
        crew = Crew(Claims(front.url), Scripted())  # pyright: ignore[reportArgumentType] - the same methods
        asyncio.run(crew.work(num_workers))
    return ends, crew


def test_conversations_are_played_until_the_run_ends(capsys: pytest.CaptureFixture[str]):
    ends, crew = worked({"reward": 1.0}, {"failure": "why"}, {"reward": 0.5}, num_workers=2)
    assert sorted(map(str, ends)) == ["{'failure': 'why'}", "{'reward': 0.5}", "{'reward': 1.0}"]
    assert (crew.num_ended, crew.num_failed) == (2, 1)
    output = capsys.readouterr().out
    assert "a conversation has failed: why" in output
    assert "2 conversations have ended, 1 have failed, mean reward 0.750" in output


def test_a_conversation_that_the_run_has_given_up_is_left():
    """The front of this test knows no state, so the conversation is gone."""
    ends, crew = worked({"hangs": True}, {"reward": 1.0})
    assert ends == [{"failure": "the program of the agent has ended"}, {"reward": 1.0}]
    assert (crew.num_ended, crew.num_failed) == (1, 1)


def test_the_program_ends_when_every_conversation_fails():
    with pytest.raises(SettingError, match="agent: every conversation fails: why"):
        worked(*[{"failure": "why"}] * 20, num_workers=2)
