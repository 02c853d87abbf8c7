"""Calls of the user's code from an event loop: coroutines in it, plain functions in the threads of its executor."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

THREADS = 256
"""Plain functions that run at a time in a process of environments."""

_running: set[object] = set()
_cancelled: set[object] = set()


async def call(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """The result of a function, async or not. A thread cannot be ended: a call that is cancelled there is abandoned."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    mark = object()

    def run() -> Any:
        _running.add(mark)
        try:
            return function(*arguments, **named)
        finally:
            _running.discard(mark)

    try:
        result = await asyncio.get_running_loop().run_in_executor(None, run)
    except asyncio.CancelledError:
        _cancelled.add(mark)
        raise
    return await result if inspect.isawaitable(result) else result


def num_abandoned() -> int:
    """Threads that still run a call whose result no coroutine awaits."""
    _cancelled.intersection_update(_running.copy())
    return len(_cancelled)
