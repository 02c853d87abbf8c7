"""The process that runs a user's reward functions: it imports neither torch nor other heavy modules.

Functions run in the main thread, one question after the other. Async ones run in one event loop in another thread, so that the
answer to one question does not wait for that to another; they have their deadline here, which costs no other call.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from ...comm.plugins import load_object
from ...comm.recipe.run import is_address
from ..user_code.channel import Channel, add_folders, explain, frames_of
from .function import RewardFunction, Scores, WrongLength, combined

_READY = "headrace.rollout.rewards.ready"


class RewardSum:
    """The weighted sum of reward functions. `answer` calls its second argument with the answer, from whichever thread has it."""

    def __init__(self, functions: list[RewardFunction], weights: list[float], timeout_s: float) -> None:
        self._functions = functions
        self._weights = weights
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self.has_async = any(function.is_async for function in functions)
        self.is_async = all(function.is_async for function in functions)

    def start(self) -> None:
        """Start the event loop if a function needs it."""
        if self.has_async:
            threading.Thread(target=self._loop.run_forever, name="async rewards", daemon=True).start()

    def answer(self, batch: dict[str, Any], reply: Callable[[dict[str, Any]], None]) -> None:
        """Score a batch; `reply` gets `rewards` and `info`, one each for a sample, or `error`."""
        begun: Future[list[Scores]] | None = None
        if self.has_async:
            begun = asyncio.run_coroutine_threadsafe(self._score_async(batch), self._loop)
        try:
            scores = [function.score(batch) for function in self._functions if not function.is_async]
        except Exception as error:  # noqa: BLE001 - the pool gets any error of the user's function
            if begun is not None:
                begun.cancel()
            reply(_failed(error))
            return
        if begun is None:
            reply(self._combined(scores, []))
            return

        def finish(ended: "Future[list[Scores]]") -> None:
            error = ended.exception(0)
            reply(_failed(error) if error else self._combined(scores, ended.result(0)))

        begun.add_done_callback(lambda ended: None if ended.cancelled() else finish(ended))

    async def _score_async(self, batch: dict[str, Any]) -> list[Scores]:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await asyncio.gather(*(each.score_async(batch) for each in self._functions if each.is_async))
        except TimeoutError:
            if not limit.expired():  # it is the user's
                raise
            raise TimeoutError(f"no answer within reward.timeout_s={self._timeout_s:g}") from None

    def _combined(self, scores: list[Scores], async_scores: list[Scores]) -> dict[str, Any]:
        parts = [iter(scores), iter(async_scores)]
        in_order = [next(parts[function.is_async]) for function in self._functions]
        samples = combined([function.name for function in self._functions], self._weights, in_order)
        return {"rewards": [reward for reward, _ in samples], "info": [info for _, info in samples]}


def _failed(error: BaseException) -> dict[str, Any]:
    if isinstance(error, WrongLength):
        return {"error": str(error), "is_misuse": True}
    return {"error": explain(error), "frames": frames_of(error)}


def load_functions(functions: Mapping[str, str], max_steps: int, timeout_s: float) -> list[RewardFunction]:
    """The functions of `reward.path` by name, built-in ones and addresses included.

    A user's file may import modules of its own folder. timeout_s: of a call, within which an address has to answer.
    """
    loaded: list[RewardFunction] = []
    for name, path in functions.items():
        if is_address(path):
            from .addresses import open_address  # the others need no HTTP

            loaded.append(RewardFunction(name, open_address(path, timeout_s), max_steps))
            continue
        path = path if ":" in path else f"{_READY}:{path}"
        add_folders(path)
        function = load_object("reward.path", path)
        # A number or a form in the answer of a tool is not the policy's.
        loaded.append(RewardFunction(name, function, max_steps, reads_last=path.startswith(f"{_READY}:")))
    return loaded


def main() -> None:
    """Answer questions until they end."""
    channel = Channel(default=str)
    settings = channel.settings
    with channel.loading():
        functions = load_functions(settings["functions"], settings["max_steps"], settings["timeout_s"])
        rewards = RewardSum(functions, settings["weights"], settings["timeout_s"])
    rewards.start()
    channel.write(0, {"is_async": rewards.is_async})
    for line in channel.questions:
        batch = json.loads(line)
        rewards.answer(batch, lambda answer, number=batch["id"]: channel.write(number, answer))


if __name__ == "__main__":
    main()
