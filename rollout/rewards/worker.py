"""The process that runs a user's reward functions: one JSON line in, one JSON line out.

`process.py` starts it on the user's files; it imports neither torch nor other heavy modules. Output that a function prints goes
to the log, not into the answers. The process ends with its standard input, and everything that it has started ends with it. A
process that a function forks can neither read questions nor answer them.

Functions run in the main thread, one question after the other. Async ones run in one event loop in another thread, so that the
answer to one question does not wait for that to another.
"""

import asyncio
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TextIO

from ...comm.plugins import load_object
from ...comm.process_tree import fork_guarded
from ...relay.dataset.rows import MAX_NESTED, is_too_deep
from .function import RewardFunction, Scores, WrongLength, combined

_READY = "headrace.rollout.rewards.ready"


class RewardSum:
    """The weighted sum of reward functions. `answer` calls its second argument with the answer, from whichever thread has it."""

    def __init__(self, functions: list[RewardFunction], weights: list[float]) -> None:
        self._functions = functions
        self._weights = weights
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
        return await asyncio.gather(*(each.score_async(batch) for each in self._functions if each.is_async))

    def _combined(self, scores: list[Scores], async_scores: list[Scores]) -> dict[str, Any]:
        parts = [iter(scores), iter(async_scores)]
        in_order = [next(parts[function.is_async]) for function in self._functions]
        samples = combined([function.name for function in self._functions], self._weights, in_order)
        return {"rewards": [reward for reward, _ in samples], "info": [info for _, info in samples]}


def explain(error: BaseException) -> str:
    """One line: the error and where in the user's code it was raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent != Path(__file__).parent]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _failed(error: BaseException) -> dict[str, Any]:
    if isinstance(error, WrongLength):
        return {"error": str(error), "is_misuse": True}
    return {"error": explain(error)}


def load_functions(functions: Mapping[str, str], max_steps: int = 0) -> list[RewardFunction]:
    """The functions of `reward.path` by name, ready ones too. A user's file may import modules of its own folder."""
    loaded: list[RewardFunction] = []
    for name, path in functions.items():
        path = path if ":" in path else f"{_READY}:{path}"
        sys.path.insert(0, str(Path(path.rpartition(":")[0]).resolve().parent))  # only the user's code runs here
        loaded.append(RewardFunction(name, load_object("reward.path", path), max_steps))
    return loaded


def main() -> None:
    """Answer the lines of standard input until it ends. The arguments are the functions and the process that starts this one."""
    settings, parent = json.loads(sys.argv[1]), int(sys.argv[2])
    fork_guarded(parent)
    questions = os.fdopen(os.dup(0), encoding="utf-8")
    # A text may have half of a surrogate pair, which no row and no message takes.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.register_at_fork(after_in_child=lambda: _close(questions.fileno(), answers.fileno()))
    try:
        rewards = RewardSum(load_functions(settings["functions"], settings["max_steps"]), settings["weights"])
        rewards.start()
        _write(answers, 0, {"is_async": rewards.is_async})
    except BaseException as error:  # noqa: BLE001 - the pool gets any error of the user's file
        _write(answers, 0, {"error": explain(error)})
        return
    for line in questions:
        batch = json.loads(line)
        rewards.answer(batch, lambda answer, number=batch["id"]: _write(answers, number, answer))


_lock = threading.Lock()


def _write(answers: TextIO, number: int, answer: dict[str, Any]) -> None:
    try:
        if is_too_deep(answer):
            raise ValueError(f"a note has more than {MAX_NESTED} lists or objects one inside the other")
        line = json.dumps({"id": number, **answer}, default=str, ensure_ascii=False)
    except Exception as error:  # noqa: BLE001 - of a note of the user's, whose text is the user's code too
        line = json.dumps({"id": number, **_failed(error)}, ensure_ascii=False)
    with _lock:
        answers.write(line + "\n")


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


if __name__ == "__main__":
    main()
