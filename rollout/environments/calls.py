"""Calls of the user's code from an event loop: coroutines in it, plain functions in threads."""

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

THREADS = 256
"""Plain functions that run at a time."""

_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="environment")
_abandoned: set["Future[Any]"] = set()


async def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The result of a function, async or not. A thread cannot be ended: a call that is cancelled there is abandoned."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    future = _threads.submit(partial(function, *arguments, **named))
    try:
        result = await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if not future.done():
            _abandoned.add(future)
            future.add_done_callback(_abandoned.discard)
        raise
    return await result if inspect.isawaitable(result) else result


def num_abandoned() -> int:
    """Threads that still run a call whose result no coroutine awaits."""
    return len(_abandoned)
