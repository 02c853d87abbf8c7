"""Tools as Python functions, in TRL's form: type hints and a docstring become the JSON schema that the chat template shows.

`relay.dataset.tool_calls` has the forms in which the policy calls them. The results are messages with the role `tool`, or
`<result>5</result>` in text. A turn without a call is the last one.
"""

import inspect
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...comm.errors import HeadraceError
from ...relay.dataset.tool_calls import ToolCall, parse_calls
from .base import UNKNOWN, Messages, StepResult, ToolUse
from .user_calls import call

Tool = Callable[..., Any]
RESERVED = {"reset", "state", "restore", "close"}
"""Methods of an environment that are not tools."""


def tools_of(environment: object) -> list[Tool]:
    """The public methods of an environment that are tools."""
    found = inspect.getmembers(environment, callable)
    return [tool for name, tool in found if not name.startswith("_") and name not in RESERVED]


class ToolEnvironment:
    """The environment of tools: each turn's calls one after the other, until a turn has none.

    owner: the user's environment whose methods the tools are, or None. Its attribute `reward` is the reward so far, if it has one.
    A tool that raises gives its error to the policy as the result; a `HeadraceError`, a fault of the host, fails the trajectory.
    """

    def __init__(self, tools: Sequence[Tool], owner: Any = None) -> None:
        self._tools = {tool.__name__: tool for tool in tools}
        self._owner = owner
        self._is_chat = False
        self._reward = 0.0
        self.calls: list[ToolUse] = []
        """Those of the newest turn."""
        if owner is None or hasattr(owner, "restore"):
            self.state = self._state
            self.restore = self._restore

    async def reset(self, **row: Any) -> Any:
        self._is_chat = not isinstance(row["prompt"], str)
        reset = getattr(self._owner, "reset", None)
        return None if reset is None else await call(reset, **row)

    async def step(self, completion: str) -> StepResult:
        self.calls = []
        calls = parse_calls(completion, list(self._tools), is_chat=self._is_chat)
        # A policy may write half of a surrogate pair, which no tokenizer takes.
        results = [(each.name, (await self._result(each)).encode(errors="replace").decode()) for each in calls]
        before = self._reward
        self._reward = float(getattr(self._owner, "reward", 0.0))
        gained = self._reward - before
        if not calls:
            return StepResult(reward=gained, done=True)
        if self._is_chat:
            messages: Messages = [{"role": "tool", "name": name, "content": text} for name, text in results]
            return StepResult(messages, gained)
        return StepResult("".join(f"<result>{text}</result>" for _, text in results), gained)

    async def close(self) -> None:
        if hasattr(self._owner, "close"):
            await call(self._owner.close)

    async def _state(self) -> Any:
        """Functions have no state that another process would need."""
        own = None if self._owner is None else await call(self._owner.state)
        return {"reward": self._reward, "own": own}

    async def _restore(self, state: Any) -> None:
        self._reward = state["reward"]
        if self._owner is not None:
            await call(self._owner.restore, state["own"])

    async def _result(self, wanted: ToolCall) -> str:
        started = time.monotonic()
        result, has_failed = await self._outcome(wanted)
        name = wanted.name if wanted.name in self._tools else UNKNOWN
        self.calls.append(ToolUse(name, has_failed, round(time.monotonic() - started, 6)))
        return result

    async def _outcome(self, wanted: ToolCall) -> tuple[str, bool]:
        """The result that the policy gets, and whether it is an error."""
        if wanted.problem:
            return json.dumps({"error": wanted.problem}), True
        if wanted.name not in self._tools:
            return json.dumps({"error": f"unknown tool {wanted.name!r}; known: {', '.join(self._tools)}"}), True
        tool = self._tools[wanted.name]
        arguments = wanted.arguments
        try:
            by_name = isinstance(arguments, dict)
            result = await (call(tool, **arguments) if by_name else call(tool, *arguments))
        except HeadraceError:  # such as a host without a sandbox: the policy has made no mistake
            raise
        except Exception as error:  # noqa: BLE001 - the policy learns from the errors of its calls
            return json.dumps({"error": f"{type(error).__name__}: {error}"}, ensure_ascii=False), True
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str), False
