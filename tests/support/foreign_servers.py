"""Servers of other projects, each in a process of its own: environments of OpenEnv, and tools of MCP.

Their packages are not in .venv; `tests/extras.sh` installs them aside.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.polling import wait_for

_GUARD = '''
import os

def guarded(app):
    """The application for those who show the token in SERVER_TOKEN, if that is set."""
    expected = f"Bearer {os.environ['SERVER_TOKEN']}".encode() if "SERVER_TOKEN" in os.environ else None

    async def check(scope, receive, send):
        if expected is None or scope["type"] == "lifespan" or dict(scope["headers"]).get(b"authorization") == expected:
            return await app(scope, receive, send)
        if scope["type"] == "websocket":
            await receive()
            return await send({"type": "websocket.close", "code": 1008})
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"no token"})

    return check
'''
PRODUCTS = (
    _GUARD
    + '''
"""An OpenEnv server. A task is a product of two numbers; an action is a product to be computed, or the answer."""
import re, sys
from random import Random
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    message: str

class Told(Observation):
    text: str

class Products(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, factors=None, **kwargs):
        random = Random(seed)
        self.factors = factors or [random.randint(10, 99), random.randint(10, 99)]
        return Told(text="{}*{}".format(*self.factors))

    def step(self, action, timeout_s=None, **kwargs):
        if action.message == "fail":
            raise RuntimeError("the environment is broken")
        if action.message == "die":
            import os
            os._exit(1)
        if found := re.fullmatch(r"(\\d{1,4})\\*(\\d{1,4})", action.message):
            return Told(text=str(int(found[1]) * int(found[2])))
        return Told(text="", done=True, reward=float(action.message == str(self.factors[0] * self.factors[1])))

    @property
    def state(self):
        return State()

app = create_fastapi_app(Products, Say, Told, max_concurrent_envs=int(sys.argv[2]))
uvicorn.run(guarded(app), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
'''
)
TOOLS = (
    _GUARD
    + '''
"""An MCP server, over its standard streams or at a port."""
import os, sys, time
try:
    from mcp.server.mcpserver import MCPServer as Server
    from mcp.server.mcpserver.exceptions import ToolError
    place = {"host": "127.0.0.1", "port": int(sys.argv[1])} if len(sys.argv) > 1 else {}
    server = Server("products")
except ImportError:  # version 1
    from mcp.server.fastmcp import FastMCP as Server
    from mcp.server.fastmcp.exceptions import ToolError
    server = Server("products", **({"host": "127.0.0.1", "port": int(sys.argv[1])} if len(sys.argv) > 1 else {}))
    place = {}

@server.tool()
def calc(expression: str) -> str:
    """Multiply two whole numbers."""
    first, star, second = expression.partition("*")
    if not (star and first.isdecimal() and second.isdecimal()):
        raise ToolError("write two numbers with a star between")
    return str(int(first) * int(second))

@server.tool()
def double(number: int) -> int:
    """Twice a number."""
    return 2 * number

@server.tool()
def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "awake"

@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)

if "SERVER_TOKEN" in os.environ:
    import uvicorn
    uvicorn.run(guarded(server.streamable_http_app()), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
else:
    server.run(*(["streamable-http"] if len(sys.argv) > 1 else ["stdio"]), **place)
'''
)

TASKSET = '''
"""A taskset of products, with a harness of two turns."""
import re
import httpx
import verifiers.v1 as vf
from random import Random
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Products", "TwoTurns"]

class Data(vf.TaskData):
    answer: str = ""

class Product(vf.Task[Data, vf.State]):
    @vf.reward
    async def right(self, trace) -> float:
        last = trace.branches[-1].messages[-1]
        return float((last.content or "") == self.data.answer)

class Products(vf.Taskset[Product]):
    def load(self):
        random = Random(0)
        for _ in range(512):
            first, second = random.randint(10, 99), random.randint(10, 99)
            yield Product(Data(prompt=f"=\\n{first}*{second}\\n", answer=str(first * second)), self.config.task)

class TwoTurns(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {secret}"}) as client:
            for _ in range(3):
                answer = await client.post(f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages})
                answer.raise_for_status()
                text = answer.json()["choices"][0]["message"]["content"] or ""
                call = re.fullmatch(r"(\\d+)\\*(\\d+)", text)
                if call is None:
                    break
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"\\n{int(call[1]) * int(call[2])}\\n"}]
        return ProgramResult(exit_code=0, stdout="", stderr="")
'''
"""A module of verifiers, `product_tasks`, in a file of that name."""


@dataclass
class Served:
    """A server's process. One that has ended can be started again at the same address."""

    words: list[str]
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        if self.process is not None:
            self.kill()
        process = self.process = subprocess.Popen([sys.executable, *self.words], env=dict(os.environ))
        wait_for(self._is_up, lambda: process.poll() is None, lambda: "the server does not listen", patience_s=60)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def _is_up(self) -> bool:
        with socket.socket() as tried:
            return not tried.connect_ex(("127.0.0.1", self.port))


@contextmanager
def serving(folder: Path, source: str, *words: str) -> Iterator[Served]:
    """A server of this module on a free port, until the body ends."""
    file = folder / "foreign_server.py"
    file.write_text(source)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served = Served([str(file), str(port), *words], port)
    served.start()
    try:
        yield served
    finally:
        served.kill()
