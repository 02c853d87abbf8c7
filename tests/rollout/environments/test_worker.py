"""Environments in their process, here in the test's own."""

import asyncio
import threading
from typing import Any

from headrace.rollout.environments.worker import Worker


class Slow:
    """An environment whose constructor waits until the test lets it end."""

    begins, ends, is_closed = threading.Event(), threading.Event(), threading.Event()

    def __init__(self) -> None:
        self.begins.set()
        assert self.ends.wait(60)

    def close(self) -> None:
        self.is_closed.set()


class Plotter:
    """An environment for data with a column `function`."""

    def reset(self, function: str, **row: Any) -> str:
        return function


def test_a_column_of_the_data_may_have_any_name():
    question: dict[str, Any] = {"key": 1, "row": {"prompt": "p", "function": "x^2"}, "completions": []}
    assert asyncio.run(Worker(Plotter, timeout_s=60).answer(question))["observation"] == "x^2"


def test_an_environment_whose_constructor_ends_after_its_deadline_is_closed():
    question: dict[str, Any] = {"key": 1, "row": {"prompt": "p"}, "completions": []}

    async def ask() -> dict[str, Any]:
        worker = Worker(Slow, timeout_s=0.01)
        answer = await worker.answer(question)
        worker.drop(1)
        Slow.ends.set()
        while not Slow.is_closed.is_set():
            await asyncio.sleep(0.001)
        await worker.close()
        return answer

    answer = asyncio.run(asyncio.wait_for(ask(), 60))
    assert answer == {"error": "no answer within environment.timeout_s=0.01", "is_late": True} and Slow.begins.is_set()


class Seeded:
    """An environment whose state is what the test gives it."""

    value: Any = None

    def reset(self, **row: Any) -> str:
        return "go"

    def state(self) -> Any:
        return self.value

    def restore(self, state: Any) -> None: ...


def test_an_environments_state_may_have_large_integers_and_no_half_of_a_surrogate_pair():
    question: dict[str, Any] = {"key": 1, "row": {"prompt": "p"}, "completions": []}

    def answer(value: Any) -> dict[str, Any]:
        Seeded.value = value
        return asyncio.run(Worker(Seeded, timeout_s=60).answer(question))

    assert answer({"seed": 2**100})["state"] == {"seed": 2**100}
    assert "surrogates" in answer("\ud800")["error"]
