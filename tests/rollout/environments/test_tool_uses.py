"""What an environment's answer says of the calls of tools, for the metrics."""

import asyncio
from typing import Any

import msgspec

from headrace.rollout.environments.base import UNKNOWN, Episode
from headrace.rollout.environments.pool import EnvironmentCall
from headrace.rollout.environments.tools import ToolEnvironment
from headrace.rollout.environments.worker import Worker


async def slow(text: str) -> str:
    """Answers after a moment, unless it is asked for an error.

    Args:
        text: any
    """
    await asyncio.sleep(0.02)
    if text == "bad":
        raise ValueError(text)
    return text


def played(*turns: str, prompt: Any = "p") -> tuple[Episode, EnvironmentCall]:
    """A trajectory of these turns, each answered by a worker with the tool `slow`; and its last call."""

    async def play() -> tuple[Episode, EnvironmentCall]:
        worker = Worker(lambda: ToolEnvironment([slow]), timeout_s=60)
        episode = Episode(prompt)
        call = EnvironmentCall(1, None, {"prompt": prompt}, episode)
        call.settle(msgspec.json.decode(msgspec.json.encode(await worker.answer(call.question()))))
        episode.calls = call.calls
        for index, turn in enumerate(turns):
            episode.end_turn(turn, [1] * (index + 1))
            call = EnvironmentCall(1, None, {"prompt": prompt}, episode)
            call.settle(msgspec.json.decode(msgspec.json.encode(await worker.answer(call.question()))))
            assert not call.failure
            episode.note(call.seconds, call.calls)
            episode.observations.append(call.step.observation)
        await worker.close()
        return episode, call

    return asyncio.run(play())


def test_each_call_has_its_tool_whether_it_failed_and_its_seconds():
    episode, last = played("<slow>a</slow> <slow>bad</slow>", "done")
    assert last.step.done and episode.calls is not None
    assert [(use.name, use.has_failed) for use in episode.calls] == [("slow", False), ("slow", True)]
    assert all(use.seconds >= 0.02 for use in episode.calls)
    assert len(episode.seconds) == 2 and episode.seconds[0] >= 0.04


def test_a_tool_that_there_is_not_has_no_name_of_its_own():
    chat = [{"role": "user", "content": "p"}]
    calls = '<tool_call>{"name": "rm", "arguments": {}}</tool_call><tool_call>{"na</tool_call>'
    episode, _ = played(calls, prompt=chat)
    assert [(use.name, use.has_failed) for use in episode.calls or ()] == [(UNKNOWN, True), (UNKNOWN, True)]


def test_a_trajectory_without_a_call_has_tools_all_the_same():
    episode, _ = played("no call")
    assert episode.calls == [] and episode.figures()["turns"] == 1
