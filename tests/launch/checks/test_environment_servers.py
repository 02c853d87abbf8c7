"""Checks of a start whose environments or tools are those of servers."""

from collections.abc import Callable

import pytest

from headrace.comm.errors import SettingError
from headrace.comm.recipe import EnvironmentSettings, Recipe, RewardSettings
from headrace.launch.config.checks.recipe import check_functions
from headrace.rollout.environments import mcp_servers, openenv

REWARD = RewardSettings(path="gsm8k")


def is_missing(*names: str) -> Callable[[str], object]:
    return lambda name: None if name in names else object()


def test_a_server_of_environments_needs_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(openenv, "find_spec", is_missing("websockets", "jsonschema"))
    recipe = Recipe(environment=EnvironmentSettings(path="openenv:http://localhost:8000"))
    needs = r"^environment.path: openenv:http://localhost:8000 needs websockets and jsonschema: pip install 'headrace\[openenv\]'"
    with pytest.raises(SettingError, match=needs):
        check_functions(recipe)


def test_a_server_of_tools_needs_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mcp_servers, "find_spec", is_missing("mcp"))
    with pytest.raises(
        SettingError, match=r"^environment.tools: mcp:serve needs .* mcp: pip install 'headrace\[mcp\]'"
    ):
        mcp_servers.McpServer("serve")


def test_an_environment_with_actions_takes_no_tools():
    settings = EnvironmentSettings(path="openenv:http://localhost:8000", tools=("mcp:serve",))
    with pytest.raises(SettingError, match="^environment.tools cannot be combined with openenv:http://localhost:8000"):
        check_functions(Recipe(environment=settings, reward=REWARD))


def test_a_server_is_no_code_of_the_user():
    settings = EnvironmentSettings(path="openenv:http://localhost:8000", tools=("mcp:serve", "tools.py:calc"))
    assert settings.user_code == ["tools.py:calc"] and settings.server == "http://localhost:8000"
    assert EnvironmentSettings(path="rooms.py:Room").user_code == ["rooms.py:Room"]
    assert not EnvironmentSettings(path="serve").user_code
