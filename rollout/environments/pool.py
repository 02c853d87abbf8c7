"""The rollout's side of its environment processes: questions with a trajectory's transcript, answers as they come.

A process finds by itself which call is too slow (`worker.py`), so a call has no deadline here, but the process has to say that it lives.
"""

import queue
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...comm.recipe import EnvironmentSettings
from ..user_code.host import UserCall, UserCodeHost, UserCodePool
from .base import Episode, StepResult, ToolUse, with_observation


class _Answer(msgspec.Struct):
    reward: float = 0.0
    done: bool = False
    state: Any = None
    error: str = ""
    is_late: bool = False
    seconds: float = 0.0
    calls: list[ToolUse] | None = None


@dataclass(slots=True, eq=False)
class EnvironmentCall(UserCall):
    """A call of an environment, then its answer or failure. `key` is the caller's, `row` is the data set's."""

    number: int
    """Number of the trajectory."""
    key: Any
    row: dict[str, Any]
    episode: Episode
    """The transcript. Without completions this is a call of `reset`, otherwise of `step` with the newest completion."""
    step: StepResult = field(default_factory=StepResult)
    state: Any = None
    seconds: float = 0.0
    calls: list[ToolUse] | None = None
    """Of the newest turn, if the environment is made of tools."""
    failure: str = ""
    is_late: bool = False
    """The failure is that there was no answer in time."""

    def question(self) -> dict[str, Any]:
        episode = self.episode
        return {
            "key": self.number, "row": self.row, "prompt": episode.prompt, "completions": episode.completions,
            "observations": episode.observations, "state": episode.state,
        }  # fmt: skip

    def settle(self, answer: dict[str, Any]) -> "Sequence[EnvironmentCall]":
        found = msgspec.convert(answer, _Answer)
        prompt = self.row["prompt"]
        if found.error:
            self.failure = found.error
            self.is_late = found.is_late
            return []
        step = StepResult(answer["observation"], found.reward, found.done)
        if self.episode.completions:
            step.check(is_chat=not isinstance(prompt, str))
        else:
            with_observation(prompt, step.observation)
        self.step = step
        self.state = found.state
        self.seconds = found.seconds
        self.calls = found.calls
        return []


class EnvironmentPool(UserCodePool[EnvironmentCall]):
    """Environment processes with a queue each: all calls of a trajectory go to one. `submit` and `finished` never block."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        given = {"path": settings.path, "tools": settings.tools, "timeout_s": settings.timeout_s}
        super().__init__("environment", settings.path or ", ".join(settings.tools), settings, given, has_beats=True)
        self._todo = [queue.Queue[EnvironmentCall | int]() for _ in range(settings.workers)]
        """Calls, and the numbers of trajectories that have gone."""

    def take(self, host: UserCodeHost[EnvironmentCall], timeout_s: float) -> Iterator[EnvironmentCall]:
        todo = self._todo[host.index]
        with suppress(queue.Empty):
            due = todo.get(timeout=timeout_s) if timeout_s else todo.get_nowait()
            while True:
                if isinstance(due, EnvironmentCall):
                    yield due
                else:
                    for call in (*host.open.values(), *host.waiting):
                        call.is_dropped |= call.number == due
                    host.tell({"drop": due})
                due = todo.get_nowait()

    def submit(self, call: EnvironmentCall) -> None:
        """Ask an environment."""
        self._todo[call.number % len(self._todo)].put(call)

    def drop(self, number: int) -> None:
        """Drop the environment of a trajectory that has ended here."""
        self._todo[number % len(self._todo)].put(number)

    def finished(self) -> list[EnvironmentCall]:
        """The calls answered since the last time. Raises `SettingError` if the environment fails from the start."""
        found = self.ended()
        self.judge([call.failure for call in found])
        return found
