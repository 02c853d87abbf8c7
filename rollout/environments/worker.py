"""The process that hosts a user's environments, with any number of calls at a time.

A question has the whole transcript of a trajectory. If this process does not host its environment, or hosts it at another turn, the
environment is built again: by `restore`, else by `reset` and the same steps. So a trajectory may move between processes, and no
process has to be kept alive.

Each call has a deadline. A coroutine is cancelled, and abandoned if it continues; a thread is abandoned. Code that blocks the event
loop itself is found by a second thread: it answers for that call, and the process ends; the host asks the next process the other
questions again.
"""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from ...comm.errors import SettingError
from ...comm.plugins import load_object
from ...comm.recipe import EnvironmentSettings
from ...comm.recipe.run import MCP
from ..user_code.channel import Channel, add_folders, explain
from .base import StepResult, with_observation
from .mcp_servers import McpServer
from .openenv import OpenEnvironment, OpenEnvServer
from .tools import ToolEnvironment, tools_of
from .user_calls import THREADS, call, num_abandoned

BEAT_S = 1.0
MOST_ABANDONED = THREADS // 2
CLOSING = "closing"
"""Name of a task that closes an environment; one that answers a question has the question's number."""


class _Hosted(NamedTuple):
    environment: Any
    num_steps: int


class Worker:
    """Environments by their trajectory, each advanced by one question at a time; used by the event loop alone.

    An environment that was made is closed once: when its trajectory has ended or asks another one, when a call of it fails, or by
    `close`.
    """

    def __init__(self, make: Callable[[], Any], timeout_s: float) -> None:
        self._make = make
        self._timeout_s = timeout_s
        self._hosted: dict[int, _Hosted] = {}
        self._asked: dict[int, object] = {}
        """A mark of the open question of each trajectory; a newer question, or `drop`, takes it away."""
        self._open: set[asyncio.Task[Any]] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """`{"observation", "reward", "done", "state", "seconds", "calls"}`, or `{"error"}` with one line for the log.

        seconds: of the environment, without its making and its rebuilding. A call that got no answer in time `is_late`.
        """
        try:
            answer = await self._advance(question)
            # This refuses half a surrogate pair. The same turn repeated would not equal what the channel makes of it.
            msgspec.json.encode(answer)
            return answer
        except TimeoutError:
            return {"error": f"no answer within environment.timeout_s={self._timeout_s:g}", "is_late": True}
        except Exception as error:  # noqa: BLE001 - the pool gets any error of the user's environment
            return {"error": explain(error)}

    def drop(self, key: int) -> None:
        """Close the environment of a trajectory that has ended: now, or once its open call has."""
        self._asked.pop(key, None)
        if (hosted := self._hosted.pop(key, None)) is not None:
            self._close(hosted.environment)

    async def close(self) -> None:
        """Close all environments, and wait for that; no question is open."""
        for key in list(self._hosted):
            self.drop(key)
        await asyncio.gather(*self._closing)

    async def _advance(self, question: dict[str, Any]) -> dict[str, Any]:
        key = question["key"]
        num_turns = len(question["completions"])
        mark = self._asked[key] = object()
        hosted = self._hosted.pop(key, None)
        if hosted is not None and hosted.num_steps != num_turns - 1:
            self._close(hosted.environment)
            hosted = None
        environment = await self._made() if hosted is None else hosted.environment
        is_whole = False
        try:
            answer = await self._answered(environment, question, is_new=hosted is None)
            is_whole = True
            return answer
        finally:
            if is_whole and self._asked.get(key) is mark:
                self._hosted[key] = _Hosted(environment, num_turns)
            else:
                self._close(environment)

    async def _made(self) -> Any:
        """A new environment. One whose constructor ends behind its deadline is closed then."""
        loop = asyncio.get_running_loop()
        made = list[Any]()
        is_late = False

        def note(environment: Any) -> None:
            made.append(environment)
            if is_late:
                self._close(environment)

        def make() -> Any:
            environment = self._make()
            loop.call_soon_threadsafe(note, environment)
            return environment

        try:
            return await self._limited(make)
        except (TimeoutError, asyncio.CancelledError):
            is_late = True
            for environment in made:
                self._close(environment)
            raise

    async def _answered(self, environment: Any, question: dict[str, Any], *, is_new: bool) -> dict[str, Any]:
        """The answer of an environment, which is `is_new` or stands before the newest turn."""
        row = question["row"]
        completions = question["completions"]
        step = StepResult()
        started = time.monotonic()
        if is_new:
            step = StepResult(await self._limited(environment.reset, **row) or "")
            with_observation(row["prompt"], step.observation)
        if completions:
            if is_new:
                await self._rebuild(environment, step.observation, question)
            started = time.monotonic()
            step = StepResult(*await self._limited(environment.step, completions[-1]))
            step.check(is_chat=not isinstance(row["prompt"], str))
        seconds = time.monotonic() - started
        has_state = hasattr(environment, "state") and hasattr(environment, "restore")
        state = await self._limited(environment.state) if has_state else None
        calls = environment.calls if isinstance(environment, ToolEnvironment) else None
        return {
            "observation": step.observation, "reward": float(step.reward), "done": bool(step.done), "state": state,
            "seconds": seconds, "calls": calls,
        }  # fmt: skip

    async def _rebuild(self, environment: Any, first: Any, question: dict[str, Any]) -> None:
        """Bring an environment whose `reset` has answered `first` to the place before its trajectory's newest turn."""
        if question["state"] is not None and hasattr(environment, "restore"):
            await self._limited(environment.restore, question["state"])
            return
        is_same = with_observation(question["row"]["prompt"], first) == question["prompt"]
        for completion, observation in zip(question["completions"], question["observations"], strict=False):
            step = StepResult(*await self._limited(environment.step, completion))
            is_same = is_same and step.observation == observation
        if not is_same:
            raise RuntimeError(
                "the environment answers the same turns differently when they are repeated; give it `state` and `restore`"
            )

    def _close(self, environment: Any) -> None:
        """Begin to close an environment; errors are ignored."""

        async def close() -> None:
            try:
                await self._limited(environment.close)
            except TimeoutError:
                print(f"an environment was not closed within environment.timeout_s={self._timeout_s:g}", flush=True)
            except Exception as error:  # noqa: BLE001 - any error of the user's environment
                print(f"an environment was not closed: {explain(error)}", flush=True)

        if hasattr(environment, "close"):
            _keep(asyncio.create_task(close(), name=CLOSING), self._closing)

    async def _limited(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """The call's result, or `TimeoutError`: a coroutine that does not end when it is cancelled is abandoned."""
        running = asyncio.current_task()
        assert running is not None
        task = asyncio.create_task(call(function, *arguments, **named), name=running.get_name())
        _keep(task, self._open)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        finally:
            task.cancel()
        if not done:
            raise TimeoutError
        return await task  # it is done


def _keep(task: asyncio.Task[Any], tasks: set[asyncio.Task[Any]]) -> None:
    """Hold a task in a set until it has ended: the event loop itself does not."""
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def open_servers(settings: EnvironmentSettings) -> dict[str, McpServer]:
    """The MCP servers of `environment.tools`, connected. Raises `SettingError`."""
    return {entry: McpServer(entry.removeprefix(MCP)) for entry in settings.tools if entry.startswith(MCP)}


def open_factory(settings: EnvironmentSettings, servers: Mapping[str, McpServer]) -> Callable[[], Any]:
    """Creates an environment for a trajectory, from `environment.path` and `environment.tools`; `servers` are those of `open_servers`.

    Raises `SettingError`.
    """
    functions = list[Callable[..., Any]]()
    for entry in settings.tools:
        functions += servers[entry].functions() if entry in servers else [load_object("environment.tools", entry)]
    names = [function.__name__ for function in functions]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise SettingError(f"environment.tools: two tools have the name {twice}")
    path = settings.path
    if not path:
        return lambda: ToolEnvironment(functions)
    if settings.server:
        server = OpenEnvServer(settings.server, settings.timeout_s)
        return lambda: OpenEnvironment(server)
    make_users = load_object("environment.path", path)

    def make() -> Any:
        environment = make_users()
        if not hasattr(environment, "step"):
            return ToolEnvironment([*functions, *tools_of(environment)], environment)
        if functions:
            raise SettingError(
                f"environment.tools cannot be combined with {path}, which has `step`; call the tools there"
            )
        return environment

    return make


class _Watchdog:
    """A thread that tells the pool that the process lives, and ends it when code of the user's blocks the event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, timeout_s: float, write: Callable[[int, dict[str, Any]], None]
    ) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._write = write
        self._ticked_at = time.monotonic()

    def start(self) -> None:
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._write(0, {"beat": True})
            self._loop.call_soon_threadsafe(self._tick)
            time.sleep(min(BEAT_S, self._timeout_s / 4))
            if time.monotonic() - self._ticked_at > self._timeout_s:
                self._end()

    def _tick(self) -> None:
        self._ticked_at = time.monotonic()
        if num_abandoned() >= MOST_ABANDONED:
            self._write(0, {"restart": True})
            os._exit(0)

    def _end(self) -> None:
        """Answer for the call that blocks. Without its number the pool finds it by asking again, one call at a time."""
        task = asyncio.current_task(self._loop)
        name = "" if task is None else task.get_name()
        if name.isdecimal():
            error = f"it blocks the other environments for environment.timeout_s={self._timeout_s:g}"
            self._write(int(name), {"error": error, "is_late": True})
        if name.isdecimal() or name == CLOSING:
            self._write(0, {"restart": True})
        os._exit(1)


async def serve(worker: Worker, channel: Channel, timeout_s: float, servers: Collection[McpServer]) -> None:
    """Answer questions until their stream ends; then close the environments and the connections to `servers`.

    The process ends with its abandoned threads.
    """
    loop = asyncio.get_running_loop()
    reader = ThreadPoolExecutor(1)
    tasks = set[asyncio.Task[None]]()
    loop.set_default_executor(ThreadPoolExecutor(THREADS))
    _Watchdog(loop, timeout_s, channel.write).start()

    async def reply(question: dict[str, Any]) -> None:
        channel.write(question["id"], await worker.answer(question))

    while line := await loop.run_in_executor(reader, channel.questions.readline):
        question = json.loads(line)
        if "drop" in question:
            worker.drop(question["drop"])
        else:
            _keep(loop.create_task(reply(question), name=str(question["id"])), tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await worker.close()
    for server in servers:
        server.close()
    os._exit(0)


def main() -> None:
    """Load the user's files, and answer."""
    channel = Channel()
    settings = msgspec.convert(channel.settings, EnvironmentSettings)
    with channel.loading():
        add_folders(*settings.user_code)
        servers = open_servers(settings)
        make = open_factory(settings, servers)
    channel.write(0, {})
    asyncio.run(serve(Worker(make, settings.timeout_s), channel, settings.timeout_s, servers.values()))


if __name__ == "__main__":
    main()
