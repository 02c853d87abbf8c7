"""Tools of MCP servers: an address, or a command whose process speaks over its standard streams.

A process of environments has one connection to each server, for all its trajectories. The connections live in an event loop of their own
thread, so that the tools are known before the first trajectory, and no server holds up the environments.

What a tool answers with an error is for the policy. A server that is gone fails the call's trajectory, and the next call connects again.
"""

import asyncio
import json
import os
import shlex
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from ...comm.errors import PeerGone, SettingError
from ..user_code.keys import KeyedAddress

CONNECT_S = 30.0
"""Longest time until a server is connected and has told its tools."""
PING_S = 2.0
"""Longest time for a sign of life of a server that has let a call wait for too long."""
CLOSE_S = 5.0
"""Longest time for the end of all connections."""
_CONNECTION_CLOSED = -32000
"""The code of MCP's clients for a connection that has ended before the answer."""


class ToolError(Exception):
    """A server's error about a call; the policy reads it."""


class _Tool(NamedTuple):
    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the form of chat templates."""
        return {"type": "function", "function": self._asdict()}

    def arguments(self, given: Sequence[str], named: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call; the one of a text prompt is the first, and JSON where the schema wants no text."""
        properties: dict[str, Any] = self.parameters.get("properties", {})
        for name, text in zip(properties, given, strict=False):
            named[name] = text
            if properties[name].get("type") != "string":
                with suppress(ValueError, RecursionError):
                    named[name] = json.loads(text)
        return named


class McpServer:
    """A server of an entry `mcp:...` of `environment.tools`, its tools, and the connection of this process to it.

    Its coroutines run in the loop of `_loop`. The connection is owned by one task, since it has to end in the task that began it.
    """

    def __init__(self, address: str) -> None:
        """address: what follows `mcp:`. Raises `SettingError` if the server cannot be used."""
        self._address = address
        self._connect = _transport_of(address)
        self._owner: asyncio.Task[None] | None = None
        self._session: Any = None
        self._is_doubtful = False
        """A call has waited for too long; the server may be gone without a word."""
        self._closing: asyncio.Future[None] | None = None
        """Done when the connection is to end."""
        self._ending = set[asyncio.Task[None]]()
        self._connecting = asyncio.Lock()
        if find_spec("mcp") is None:
            raise SettingError(f"environment.tools: mcp:{address} needs the package mcp: pip install 'headrace[mcp]'")
        self._error: type[Exception] = _error_class()
        try:
            self.tools = _run(self._list(), CONNECT_S)
        except Exception as error:
            raise SettingError(
                f"environment.tools: the MCP server {address} cannot be used: {_text_of(error)}"
            ) from error
        if not self.tools:
            raise SettingError(f"environment.tools: the MCP server {address} has no tools")

    def functions(self) -> list[Callable[..., Any]]:
        """The tools as functions of their names, async."""

        def function_of(tool: _Tool) -> Callable[..., Any]:
            async def function(*given: str, **named: Any) -> str:
                answer = asyncio.run_coroutine_threadsafe(self._call(tool, tool.arguments(given, named)), _loop())
                return await asyncio.wrap_future(answer)

            function.__name__ = tool.name
            return function

        return [function_of(tool) for tool in self.tools]

    def close(self) -> None:
        """End the connection."""
        with suppress(Exception):
            _run(self._end(), 2 * CLOSE_S)

    async def _list(self) -> list[_Tool]:
        session = await self._connected()
        paginated = import_module("mcp.types").PaginatedRequestParams
        found: list[_Tool] = []
        cursor: str | None = None
        while True:
            page = await session.list_tools(params=paginated(cursor=cursor))
            answer = page.model_dump(by_alias=True, mode="json")
            found += [
                _Tool(each["name"], each.get("description") or "", each["inputSchema"]) for each in answer["tools"]
            ]
            if not (cursor := answer.get("nextCursor")):
                return found

    async def _call(self, tool: _Tool, arguments: dict[str, Any]) -> str:
        session = await self._alive()
        owner = self._owner
        assert owner is not None
        call = asyncio.ensure_future(session.call_tool(tool.name, arguments))
        try:
            await asyncio.wait({call, owner}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._is_doubtful = True
            raise
        finally:
            call.cancel()
        if not call.done() or call.cancelled():
            raise self._gone("it has ended the connection")
        try:
            answer = (await call).model_dump(by_alias=True, mode="json")
        except self._error as error:
            told: Any = getattr(error, "error", error)
            if told.code == _CONNECTION_CLOSED:
                self._drop()
                raise self._gone(str(error)) from None
            raise ToolError(str(error)) from None
        except Exception as error:  # noqa: BLE001 - of the streams beneath
            self._drop()
            raise self._gone(_text_of(error)) from None
        if answer.get("isError"):
            raise ToolError(_result(answer))
        return _result(answer)

    def _gone(self, reason: str) -> PeerGone:
        return PeerGone(f"the MCP server {self._address} is gone: {reason}")

    async def _alive(self) -> Any:
        """The session, a new one if the server is gone. Raises `PeerGone`."""
        if self._is_doubtful and self._owner is not None and not self._owner.done():
            self._is_doubtful = False
            try:
                await asyncio.wait_for(self._session.send_ping(), PING_S)
            except Exception:  # noqa: BLE001 - whatever it is, a new connection is needed
                self._drop()
        try:
            return await self._connected()
        except Exception as error:  # noqa: BLE001 - of the transport, or of the server's process
            raise self._gone(_text_of(error)) from None

    async def _connected(self) -> Any:
        async with self._connecting:
            if self._owner is None or self._owner.done():
                loop = asyncio.get_running_loop()
                self._closing = loop.create_future()
                begun: asyncio.Future[Any] = loop.create_future()
                self._owner = asyncio.create_task(self._own(begun, self._closing))
                self._session = await asyncio.wait_for(begun, CONNECT_S)
            return self._session

    async def _own(self, begun: "asyncio.Future[Any]", closing: "asyncio.Future[None]") -> None:
        """Hold a connection until it breaks, or until `closing`."""
        try:
            async with AsyncExitStack() as stack:
                streams = await self._connect(stack)
                session_class = import_module("mcp.client.session").ClientSession
                session = await stack.enter_async_context(session_class(*streams[:2]))
                await session.initialize()
                if not begun.done():
                    begun.set_result(session)
                await closing  # its owner is `_drop`, or the end of the process
        except BaseException as error:
            if begun.done():
                return
            begun.set_exception(PeerGone(_text_of(error)))
            if not isinstance(error, Exception):
                raise

    def _drop(self) -> None:
        """Use the connection no more, and end it beside the calls: a server's process may take its time."""
        if self._closing is not None and not self._closing.done():
            self._closing.set_result(None)
        if (owner := self._owner) is not None:
            self._owner = None
            ending = asyncio.create_task(_ended(owner))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _end(self) -> None:
        self._drop()
        await asyncio.gather(*self._ending)


async def _ended(owner: "asyncio.Task[None]") -> None:
    """Wait for the end of a connection, and cancel it if it takes too long."""
    await asyncio.wait({owner}, timeout=CLOSE_S)
    owner.cancel()


def _transport_of(address: str) -> Callable[[AsyncExitStack], Awaitable[Any]]:
    """Opens the streams to a server, which a stack then holds. Raises `SettingError` for an address that cannot be used."""
    keyed = KeyedAddress.of("environment.tools", address) if address.startswith(("http://", "https://")) else None

    async def connect(stack: AsyncExitStack) -> Any:
        if keyed is None:
            stdio: Any = import_module("mcp.client.stdio")
            command, *arguments = shlex.split(address)
            parameters = stdio.StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
            return await stack.enter_async_context(stdio.stdio_client(parameters))
        client = None
        if keyed.headers:
            make: Any = import_module("mcp.shared._httpx_utils").create_mcp_http_client  # it follows no redirect
            client = await stack.enter_async_context(make(headers=keyed.headers))
        http: Any = import_module("mcp.client.streamable_http")
        return await stack.enter_async_context(http.streamable_http_client(keyed.url, http_client=client))

    return connect


def _error_class() -> type[Exception]:
    """The error of MCP's client for an answer that is an error: the versions 1 and 2 name it differently."""
    errors: Any = import_module("mcp.shared.exceptions")
    return getattr(errors, "MCPError", None) or errors.McpError


def _result(answer: dict[str, Any]) -> str:
    """The result of a call as text: its texts, and in place of pictures and other things their kind."""
    parts = [part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in answer["content"]]
    if not parts and answer.get("structuredContent") is not None:
        return json.dumps(answer["structuredContent"], ensure_ascii=False)
    return "\n".join(parts)


def _text_of(error: BaseException) -> str:
    """The first error of a group, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all connections of this process, in its own thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop


def _run(coroutine: Coroutine[Any, Any, Any], limit_s: float) -> Any:
    """The result of a coroutine in the loop of the connections, for a thread that may wait."""
    return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, limit_s), _loop()).result(limit_s + 1)
