"""A process of its own loads the files of tools and answers with their schemas, or with the error of the file."""

import os
from pathlib import Path

import pytest

from headrace.comm.errors import SettingError
from headrace.comm.recipe import EnvironmentSettings
from headrace.rollout.environments.schemas import tool_schemas

FILE = '''
import os
import threading
import time

print("a line of the user's")
threading.Thread(target=time.sleep, args=(600,)).start()
NAMES = sorted(name for name in os.environ if name.startswith("HEADRACE_SECRET"))

def add(left: int, right: int = 1) -> int:
    """
    Add two numbers.

    Args:
        left: The first.
        right: The second.
    """
    return left + right

def bare(x):
    return x

def place() -> str:
    """PLACE"""

place.__doc__ = f"{os.getpid()} {NAMES}"

class Stock:
    def reset(self, **row):
        pass

    def take(self, number: int) -> str:
        """
        Take from the stock.

        Args:
            number: How many.
        """

class Game:
    def reset(self, **row):
        pass

    def step(self, completion):
        pass
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "my tools"
    folder.mkdir()
    (folder / "tools.py").write_text(FILE)
    return folder / "tools.py"


def test_functions_and_the_methods_of_an_environment_without_step_are_tools(file: Path):
    schemas = tool_schemas(EnvironmentSettings(path=f"{file}:Stock", tools=(f"{file}:add",)))
    assert schemas is not None and [each["function"]["name"] for each in schemas] == ["add", "take"]
    assert schemas[0]["function"]["parameters"]["required"] == ["left"]


def test_without_tools_there_are_no_schemas(file: Path):
    assert tool_schemas(EnvironmentSettings()) is None
    assert tool_schemas(EnvironmentSettings(path=f"{file}:Game")) is None


def test_the_users_file_runs_in_another_process_without_the_runs_secret(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADRACE_SECRET", "of the run")
    (schema,) = tool_schemas(EnvironmentSettings(tools=(f"{file}:place",))) or []
    pid, names = schema["function"]["description"].split(maxsplit=1)
    assert int(pid) != os.getpid() and names == "[]"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("bare", FILE, "^environment.tools: .*bare"),
        ("absent", FILE, "^environment.tools: .* has no absent$"),
        ("add", "1 / 0", r"^environment.tools cannot be loaded: ZeroDivisionError: division by zero \(tools.py:1\)$"),
        ("add", "import os; os._exit(3)", "^environment.tools cannot be loaded: its process ended with 3$"),
    ],
)
def test_a_file_that_gives_no_schemas_is_a_mistake_in_the_settings(file: Path, name: str, text: str, said: str):
    file.write_text(text)
    with pytest.raises(SettingError, match=said):
        tool_schemas(EnvironmentSettings(tools=(f"{file}:{name}",)))
