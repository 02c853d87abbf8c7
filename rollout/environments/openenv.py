"""Environments of an OpenEnv server: each trajectory is a session of its own, over a WebSocket.

We ask {"type": "reset", "data": the row} and {"type": "step", "data": the action}. The answer is an "observation" with `observation`,
`reward` and `done`, or an "error" with a message and a code.

A session lives on one connection: if that ends, the trajectory has failed. OpenEnv's own client would connect again, and step in an
environment that nobody has reset. A session cannot be moved either; elsewhere its steps are repeated (`worker.py`).
"""

import asyncio
import json
import time
import urllib.error
import urllib.request
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit
from zlib import crc32

from ...comm.errors import SettingError
from ..user_code.keys import KeyedAddress
from .actions import ActionForm, WrongAction, observation_text
from .base import StepResult

SCHEMA_S = 10.0
"""Longest time until a server has told the form of its actions."""
MAX_MESSAGE = 64 << 20
"""Bytes of the longest message of a server."""
FULL_PAUSE_S = 0.2
"""Seconds after which a server that has no room for a session is asked again."""
FULL_SHARE = 0.8
"""Share of `environment.timeout_s` for which it is asked."""
_FULL = "CAPACITY_REACHED"
_PACKAGES = ("websockets", "jsonschema")


class OpenEnvServer:
    """A server, and the form of its actions as this process has read it."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """timeout_s: longest time of one call."""
        address = KeyedAddress.of("environment.path", url)
        parts = urlsplit(address.url.rstrip("/"))
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise SettingError(
                f"environment.path: openenv:{url} needs an address such as openenv:http://localhost:8000"
            )
        if missing := [name for name in _PACKAGES if find_spec(name) is None]:
            raise SettingError(
                f"environment.path: openenv:{url} needs {' and '.join(missing)}: pip install 'headrace[openenv]'"
            )
        self.url = parts.geturl()
        self.socket_url = parts._replace(scheme={"http": "ws", "https": "wss"}[parts.scheme]).geturl() + "/ws"
        self.headers = address.headers
        self.timeout_s = timeout_s
        self._form: ActionForm | None = None

    def read_form(self) -> ActionForm:
        """The form of the actions, which the server tells once. Raises `SettingError` if it does not, or if it cannot be used."""
        if self._form is None:
            request = urllib.request.Request(f"{self.url}/schema")
            for name, value in self.headers.items():
                request.add_unredirected_header(name, value)  # a key is for this server alone
            try:
                with urllib.request.urlopen(request, timeout=min(SCHEMA_S, self.timeout_s)) as answer:
                    schema = json.loads(answer.read(MAX_MESSAGE))["action"]
            except (OSError, ValueError, LookupError, TypeError) as error:
                reason = error.reason if isinstance(error, urllib.error.URLError) else error
                raise SettingError(
                    f"environment.path: {self.url} does not answer as an OpenEnv server: {reason or type(error).__name__}"
                ) from error
            try:
                self._form = ActionForm(schema)
            except (ValueError, AttributeError, TypeError) as error:
                raise SettingError(f"environment.path: the server {self.url} cannot be used: {error}") from error
        return self._form


class OpenEnvironment:
    """A session: `reset` opens it with the columns of the data set's row, `step` turns the policy's text into an action."""

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._socket: Any = None
        self._form: ActionForm | None = None
        self._is_chat = False

    async def reset(self, **row: Any) -> str:
        """Open the session. Without a column `seed` all samples of the row get one that follows from the row."""
        prompt = row.pop("prompt")
        self._is_chat = not isinstance(prompt, str)
        self._form = await asyncio.to_thread(self._server.read_form)
        data = {"seed": crc32(json.dumps([prompt, row], sort_keys=True, default=str).encode()) >> 1} | row
        answer = await self._open(data)
        if answer.get("done"):
            raise RuntimeError(f"the environment of {self._server.url} was done at its reset")
        text = observation_text(answer["observation"])
        before = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
        return ("\n" if before and not before[-1].isspace() else "") + text + ("" if self._is_chat else "\n")

    async def step(self, completion: str) -> StepResult:
        """Take the action that the policy wrote; it reads what is wrong with one that is none."""
        assert self._form is not None
        try:
            action = self._form.action(completion)
        except WrongAction as error:
            return StepResult(self._inserted(json.dumps({"error": str(error)}, ensure_ascii=False)))
        answer = await self._ask("step", action)
        reward = float(answer.get("reward") or 0.0)
        if answer.get("done"):
            return StepResult("", reward, done=True)
        return StepResult(self._inserted(observation_text(answer["observation"])), reward)

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.close()

    def _inserted(self, text: str) -> str:
        """In a text prompt an observation has lines of its own."""
        return text if self._is_chat else f"\n{text}\n"

    async def _open(self, data: dict[str, Any]) -> dict[str, Any]:
        """The answer to the reset of a new session. A server that is full is asked again for a while."""
        connect: Any = import_module("websockets.asyncio.client").connect
        server = self._server
        if urlsplit(server.url).hostname in ("localhost", "127.0.0.1", "::1"):
            connect = partial(connect, proxy=None)
        until = time.monotonic() + FULL_SHARE * server.timeout_s
        while True:
            try:
                self._socket = await connect(
                    server.socket_url,
                    additional_headers=server.headers,
                    open_timeout=server.timeout_s,
                    max_size=MAX_MESSAGE,
                )
            except (OSError, _exceptions().WebSocketException) as error:
                raise ConnectionError(
                    f"the OpenEnv server {server.url} has no session for the trajectory: {error}"
                ) from None
            try:
                return await self._ask("reset", data)
            except _Refused as error:
                if error.code != _FULL or time.monotonic() > until:
                    raise
            await self._socket.close()
            await asyncio.sleep(FULL_PAUSE_S)

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """One question of the session; the caller limits its time (`Worker`)."""
        url = self._server.url
        closed = _exceptions().ConnectionClosed
        try:
            with suppress(closed):  # a server that is full says so before it is asked
                await self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self._socket.recv())
        except closed as error:
            raise ConnectionError(f"the OpenEnv server {url} has ended the session: {error}") from None
        found = answer.get("data")
        if answer.get("type") == "error":
            raise _Refused(f"the OpenEnv server {url} says: {found.get('message')} ({found.get('code')})", found)
        if isinstance(found, dict) and isinstance(found.get("observation"), dict):
            return found
        raise ValueError(f"the OpenEnv server {url} answers `{kind}` without an observation")


def _exceptions() -> Any:
    return import_module("websockets.exceptions")


class _Refused(RuntimeError):
    """The server has answered with an error."""

    def __init__(self, message: str, data: dict[str, Any]) -> None:
        super().__init__(message)
        self.code = data.get("code")
