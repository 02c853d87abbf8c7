"""Tools of real MCP servers, at an address and as a command."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.environment_calls import answered
from support.foreign_servers import TOOLS, Served, serving

from headrace.comm.errors import SettingError
from headrace.comm.recipe import EnvironmentSettings
from headrace.rollout.environments.base import Episode, Messages
from headrace.rollout.environments.pool import EnvironmentCall, EnvironmentPool
from headrace.rollout.environments.schemas import tool_schemas

pytest.importorskip("mcp")

pytestmark = pytest.mark.extra
CHAT: Messages = [{"role": "user", "content": "How much?"}]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The entry of a server that speaks over its standard streams."""
    file = tmp_path_factory.mktemp("mcp") / "tools.py"
    file.write_text(TOOLS)
    return f"mcp:{shlex.join([sys.executable, str(file)])}"


@contextmanager
def asking(*tools: str, timeout_s: float = 10) -> Iterator[EnvironmentPool]:
    pool = EnvironmentPool(EnvironmentSettings(tools=tools, timeout_s=timeout_s)).start()
    try:
        yield pool
    finally:
        pool.close()


def called(pool: EnvironmentPool, number: int, *turns: str, prompt: str | Messages = "go") -> EnvironmentCall:
    """The answer to the newest turn of a trajectory that has only this one, or to its reset."""
    call = EnvironmentCall(number, None, {"prompt": prompt}, Episode(prompt, list(turns)))
    return answered(pool, [call])[0]


def content(call: EnvironmentCall) -> str:
    """The text of the first message that answers a turn."""
    first: Any = call.step.observation[0]
    return first["content"]


def hermes(call: str) -> str:
    return f"<tool_call>{call}</tool_call>"


def test_the_policy_calls_the_tools_of_a_command_and_reads_their_errors(command: str):
    with asking(command) as pool:
        right = called(pool, 1, "<calc>37*48</calc> and <double>21</double>")
        assert right.step.observation == "<result>1776</result><result>42</result>"
        assert [(use.name, use.has_failed) for use in right.calls or []] == [("calc", False), ("double", False)]
        chat = called(pool, 2, hermes('{"name": "calc", "arguments": {"expression": "37*48"}}'), prompt=CHAT)
        assert chat.step.observation == [{"role": "tool", "name": "calc", "content": "1776"}]
        wrong = called(pool, 3, hermes('{"name": "calc", "arguments": {"expression": "37"}}'), prompt=CHAT)
        assert "write two numbers with a star between" in content(wrong)
        assert content(wrong).startswith('{"error": "ToolError: ')
        lacking = called(pool, 4, hermes('{"name": "double", "arguments": {}}'), prompt=CHAT)
        assert "number" in content(lacking) and (lacking.calls or [])[0].has_failed
        unknown = called(pool, 5, hermes('{"name": "triple", "arguments": {}}'), prompt=CHAT)
        assert "known: calc, double, sleep, die" in content(unknown)
        assert called(pool, 6, "1776").step.done


def test_a_template_gets_the_servers_schemas(command: str):
    first, second, *_ = tool_schemas(EnvironmentSettings(tools=(command,))) or []
    assert first["type"] == "function" and first["function"]["description"] == "Multiply two whole numbers."
    assert second["function"]["name"] == "double"
    assert second["function"]["parameters"]["properties"]["number"]["type"] == "integer"


def test_tools_of_a_server_and_functions_work_side_by_side(command: str, tmp_path: Path):
    (tmp_path / "own.py").write_text("def triple(number):\n    return 3 * int(number)\ncalc = triple\n")
    with asking(f"{tmp_path}/own.py:triple", command) as pool:
        assert called(pool, 1, "<triple>5</triple><double>5</double>").step.observation == (
            "<result>15</result><result>10</result>"
        )


@contextmanager
def each_kind(kind: str, command: str, folder: Path) -> Iterator[tuple[str, Served | None]]:
    if kind == "command":
        yield command, None
        return
    with serving(folder, TOOLS) as served:
        yield f"mcp:{served.url}/mcp", served


@pytest.mark.parametrize("kind", ["command", "address"])
def test_a_dead_server_fails_the_trajectory_and_the_next_call_connects_again(kind: str, command: str, tmp_path: Path):
    with each_kind(kind, command, tmp_path) as (entry, served), asking(entry, timeout_s=5) as pool:
        assert called(pool, 1, "<calc>2*3</calc>").step.observation == "<result>6</result>"
        died = called(pool, 2, "<die></die>")
        assert "is gone" in died.failure or died.is_late
        if served is not None:
            gone = called(pool, 3, "<calc>2*3</calc>")
            assert "is gone" in gone.failure, "never the policy's mistake"
            served.start()
        assert called(pool, 4, "<calc>2*4</calc>").step.observation == "<result>8</result>"


def test_a_call_that_hangs_fails_its_own_trajectory(command: str):
    with asking(command, timeout_s=1) as pool:
        assert called(pool, 1, "<calc>2*3</calc>").step.observation == "<result>6</result>"
        late = called(pool, 2, "<sleep>3</sleep>")
        assert late.is_late and "environment.timeout_s=1" in late.failure
    with asking(command) as pool:
        assert called(pool, 3, "<calc>2*4</calc>").step.observation == "<result>8</result>"


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("mcp:no-such-program", "the MCP server no-such-program cannot be used: .*no-such-program"),
        ("mcp:http://127.0.0.1:9/mcp", "the MCP server http://127.0.0.1:9/mcp cannot be used: .*"),
        ("mcp:true", "the MCP server true cannot be used: "),
    ],
)
def test_a_server_that_cannot_be_used_ends_the_start(entry: str, problem: str):
    with pytest.raises(SettingError, match=f"^environment.tools: {problem}"):
        tool_schemas(EnvironmentSettings(tools=(entry,)))


def test_two_tools_of_one_name_are_refused(command: str, tmp_path: Path):
    (tmp_path / "own.py").write_text("def calc(expression):\n    return ''\n")
    with (
        asking(f"{tmp_path}/own.py:calc", command) as pool,
        pytest.raises(SettingError, match="two tools .* name calc"),
    ):
        called(pool, 1)


def test_a_server_that_demands_a_token_gets_the_one_that_the_address_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    token = "sesame-of-the-server"
    monkeypatch.setenv("SERVER_TOKEN", token)
    with serving(tmp_path, TOOLS) as server:
        monkeypatch.delenv("SERVER_TOKEN")
        entry = f"mcp:{server.url}/mcp#key=TOOLS_KEY"
        for key, told in (("", "TOOLS_KEY is not set"), ("wrong", "cannot be used")):
            monkeypatch.setenv("TOOLS_KEY", key)
            with pytest.raises(SettingError, match=f"^environment.tools: .*{told}"):
                tool_schemas(EnvironmentSettings(tools=(entry,)))
        monkeypatch.setenv("TOOLS_KEY", token)
        schemas = tool_schemas(EnvironmentSettings(tools=(entry,)))
        assert schemas is not None and "calc" in {each["function"]["name"] for each in schemas}
        with asking(entry) as pool:
            assert called(pool, 1, "<calc>37*48</calc>").step.observation == "<result>1776</result>"
            server.kill()
            lost = called(pool, 2, "<calc>37*48</calc>")
            assert lost.failure and token not in lost.failure
