"""The JSON schemas of tools, for the chat template. They need the user's files, which a process of their own loads, as the worker does.

So these files run neither in the launcher nor in the rollout, which has the run's secret.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

from ...comm.environment import environment_of_users_code
from ...comm.errors import SettingError
from ...comm.plugins import load_object
from ...comm.recipe import EnvironmentSettings
from ...comm.recipe.run import MCP
from ..user_code.channel import Channel, add_folders, explain
from ..user_code.host import KILL_S, STARTUP_S
from .mcp_servers import McpServer
from .tools import Tool, tools_of


def tool_schemas(settings: EnvironmentSettings) -> list[dict[str, Any]] | None:
    """JSON schemas of the tools; None without tools.

    Raises `SettingError` for a file that cannot be loaded, and for a function without type hints or docstring.
    """
    return _read_schemas(settings.path, settings.tools) if settings.is_set else None


@cache
def _read_schemas(path: str, tools: tuple[str, ...]) -> list[dict[str, Any]] | None:
    setting = "environment.tools" if tools else "environment.path"
    words = ["-m", "headrace.rollout.environments.schemas", json.dumps({"path": path, "tools": tools})]
    process = subprocess.Popen(
        [sys.executable, *words, str(os.getpid())],
        env=environment_of_users_code(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=STARTUP_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # its guardian ends what it has started
        process.wait(KILL_S)
        raise SettingError(f"{setting}: loading it takes longer than {STARTUP_S:g} s") from None
    if not output:
        raise SettingError(f"{setting} cannot be loaded: its process ended with {process.returncode}")
    answer = json.loads(output)
    if "error" in answer:
        raise SettingError(answer["error"])
    return answer["schemas"]


def _load_schemas(settings: EnvironmentSettings) -> list[dict[str, Any]] | None:
    schemas = list[dict[str, Any]]()
    for tool in settings.tools:
        if tool.startswith(MCP):
            server = McpServer(tool.removeprefix(MCP))
            schemas += [each.schema for each in server.tools]
            server.close()
        else:
            schemas += _schemas_of([load_object("environment.tools", tool)])
    if settings.path and not settings.server:
        made = load_object("environment.path", settings.path)
        if isinstance(made, type) and not hasattr(made, "step"):
            schemas += _schemas_of(tools_of(object.__new__(made)))
    return schemas or None


def _schemas_of(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    from transformers.utils import chat_template_utils as form

    try:
        return [form.get_json_schema(tool) for tool in tools]
    except (form.TypeHintParsingException, form.DocstringParsingException) as error:
        raise SettingError(f"environment.tools: {error}") from error


def main() -> None:
    """Answer with the schemas, or with the error."""
    channel = Channel()
    settings = msgspec.convert(channel.settings, EnvironmentSettings)
    try:
        add_folders(*settings.user_code)
        channel.write(0, {"schemas": _load_schemas(settings)})
    except SettingError as error:
        channel.write(0, {"error": str(error)})
    except BaseException as error:  # noqa: BLE001 - the user gets any error of the file
        setting = "environment.tools" if settings.tools else "environment.path"
        channel.write(0, {"error": f"{setting} cannot be loaded: {explain(error)}"})
    os._exit(0)  # threads that the user's file has started do not keep it


if __name__ == "__main__":
    main()
