"""The file that is written for a function of a script or of a notebook's cells: another process can load it, and it does the same."""

import itertools
import linecache
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.notebook import Notebook

from headrace.comm.errors import SettingError
from headrace.launch.config.checks.signatures import check_tools
from headrace.launch.config.load import recipe_of
from headrace.launch.python.inputs import PythonInputs
from headrace.launch.python.keywords import nested
from headrace.launch.python.source import literal
from headrace.rollout.environments.schemas import tool_schemas

_numbers = itertools.count()


class WrittenNotebook(Notebook):
    """A notebook whose functions are written for a run in `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def path_of(self, name: str) -> str:
        """The recipe's words for an object of the notebook; its file is written."""
        inputs = PythonInputs(self._folder)
        found = inputs.settings({"reward.path": self.names[name]})["reward.path"]
        inputs.write()
        return found

    def result(self, name: str, *arguments: object) -> str:
        """The function's result in another process, which starts in another folder."""
        file, _, function = self.path_of(name).rpartition(":")
        code = f"import runpy; print(runpy.run_path({file!r})[{function!r}](*{arguments!r}))"
        done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + Path(file).read_text()
        return done.stdout.strip()

    def refused(self, name: str) -> str:
        with pytest.raises(SettingError) as told:
            self.path_of(name)
        assert not (self._folder / "inputs").exists()
        return str(told.value)


@pytest.fixture
def notebook(tmp_path: Path) -> WrittenNotebook:
    return WrittenNotebook(tmp_path / "a run")


def test_a_function_takes_along_what_it_uses_of_all_cells(notebook: WrittenNotebook):
    notebook.cell(
        """
        import functools, logging, re
        import os.path as place
        import xml.etree.ElementTree
        from collections import Counter
        from dataclasses import dataclass
        from pathlib import Path
        from typing import Any

        NUMBER = re.compile(r"\\d+", re.ASCII)
        WEIGHTS = {"a": 1.5, ("b", 2): [None, True, float("inf")], "c": {1, 2}, "d": frozenset(), "e": (1,)}
        HOME = Path("/home/x y")
        log = logging.getLogger("mine")
        """
    ).cell(
        """
        from __future__ import annotations
        def traced(function):
            @functools.wraps(function)
            def inner(*given: Unknown):
                return function(*given)
            return inner

        @dataclass
        class Best:
            value: float = WEIGHTS["a"]

        @functools.cache
        def weight(text: str) -> float:
            return Best().value + len(NUMBER.findall(text))

        @traced
        def score(text: str, more: Any = WEIGHTS) -> object:
            def local(x):
                return x + weight(text)
            log.debug(text)
            Counter = 3
            tag = xml.etree.ElementTree.fromstring("<b/>").tag
            return local(Counter), more[("b", 2)], place.basename(HOME), tag, other(2)
        """
    ).cell(
        """
        def other(n):
            return 0 if n == 0 else score_of(n - 1)

        def score_of(n):
            return other(n)
        """
    )
    assert notebook.result("score", "1 22 x") == "(6.5, [None, True, inf], 'x y', 'b', 0)"


def test_constants_have_the_values_of_the_moment_and_names_of_other_scopes_are_left_alone(notebook: WrittenNotebook):
    notebook.cell("limit = 1\nmodel = object()\ntext = object()\nsum = max")
    notebook.cell("def f(row, text):\n    model = row\n    return [text.upper(), model, limit, sum([1, 2])]\nlimit = 7")
    assert notebook.result("f", 1, "a") == "['A', 1, 7, 2]"


def test_a_cell_that_is_run_again_gives_the_newer_function(notebook: WrittenNotebook):
    notebook.cell("def f():\n    return helper()\ndef helper():\n    return 1").cell("def helper():\n    return 2")
    assert notebook.result("f") == "2"


def test_classes_and_async_functions_are_written_too(notebook: WrittenNotebook):
    notebook.cell(
        "import asyncio\nclass Base:\n    start = 4\nclass World(Base):\n    def reset(self):\n        return self.start"
    )
    notebook.cell("async def wait():\n    return World().reset()\ndef run():\n    return asyncio.run(wait())")
    assert notebook.result("run") == "4"
    assert notebook.path_of("World").endswith("functions.py:World")


def test_a_tool_of_a_notebook_has_its_schema_in_the_run(tmp_path: Path):
    notebook = Notebook().cell("import typing\nfrom typing import Literal\nOPERATORS = ('+', '-')")
    notebook.cell(
        """
        def calc(a: int, operator: Literal["+", "-"], b: typing.Optional[int] = None) -> str:
            \"\"\"Calculate.

            Args:
                a: a number
                operator: one of two
                b: another number
            \"\"\"
            return str(OPERATORS)
        """
    )
    inputs = PythonInputs(tmp_path / "run")
    settings = recipe_of(nested(inputs.settings({"environment.tools": [notebook.names["calc"]]}))).environment
    inputs.write()
    check_tools(settings)
    (schema,) = tool_schemas(settings) or []
    assert schema["function"]["parameters"]["properties"]["operator"]["enum"] == ["+", "-"]


def test_a_function_of_a_module_keeps_its_file_and_finds_its_neighbours(
    notebook: WrittenNotebook, tmp_path: Path, monkeypatch
):
    name = f"rewards_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text("def score():\n    return 5\n")
    (package := tmp_path / f"{name}_package").mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").write_text(f"from .{'deep'} import score\n")
    (package / "deep.py").write_text("def score():\n    return 6\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    notebook.cell(f"import {name}\nfrom {name} import score\nfrom {name}_package.inner import score as inner")
    notebook.cell(f"def both():\n    return {name}.score() + score() + inner()")
    assert notebook.path_of("score") == f"{tmp_path / name}.py:score"
    assert notebook.result("both") == "16"
    assert notebook.result("inner") == "6"


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        ("f = lambda text: 1", "reward.path: a lambda has no name; write a function with def"),
        ("def make(limit):\n    def g(x):\n        return limit\n    return g\nf = make(3)", "reward.path: g uses limit, local to make(), which is not in its source"),
        ("def mark(g):\n    def inner(x):\n        return g(x)\n    return inner\n@mark\ndef f(x):\n    return 1", "reward.path: inner uses g, local to mark()"),
        ("class A:\n    def score(self):\n        return 1\nf = A().score", "reward.path: score is a method of an object, which stays in this process"),
        ("class A:\n    def __call__(self):\n        return 1\nf = A()", "reward.path: an object of type A is not a function"),
        ("import functools\nf = functools.partial(print, 1)", "reward.path: an object of type partial is not a function"),
        ("client = object()\ndef f():\n    return client", "reward.path: the function uses client, an object of type object that the script has made"),
        ("cache = {'a': [object()]}\ndef f():\n    return cache", "reward.path: the function uses cache, an object of type dict"),
        ("def make():\n    class A:\n        pass\n    return A\nf = make()", "reward.path: the class A is defined within a function"),
        ("import types\nown = types.ModuleType('own')\ndef f():\n    return own.x", "reward.path: the function uses the module own, which has no file"),
    ],
    ids=["lambda", "closure", "decorator", "method", "callable", "partial", "object", "container", "class", "module"],
)  # fmt: skip
def test_what_has_no_source_is_refused_by_name(notebook: WrittenNotebook, cell: str, told: str):
    notebook.cell(cell)
    assert told in notebook.refused("f")


@pytest.mark.parametrize(
    "cell",
    [
        "API_KEY = 'sk-secret-123'",
        "my_token = 'hf_abcDEF0123456789'",
        "HEADERS = {'Authorization': 'Bearer tell-no-one-5'}",
        "KEYS = ['tell-no-one-5']",
    ],
)
def test_a_secret_of_the_script_is_not_written(notebook: WrittenNotebook, cell: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", "tell-no-one-5")
    name = cell.partition(" ")[0]
    notebook.cell(f"{cell}\ndef f():\n    return {name}")
    told = notebook.refused("f")
    assert f"reward.path: the function uses {name}, which looks like a secret" in told and "tell" not in told
    assert 'read it inside the function, with os.environ["NAME"]' in told


def test_other_tokens_and_keys_are_written_for_the_owner_alone(
    notebook: WrittenNotebook, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUDGE_KEY", "")
    notebook.cell("STOP_TOKEN = '<|endoftext2|>'\nMAX_TOKENS = 512\nANSWER_KEY = 'final_answer'\nTOKENIZER = 'a/b-0.5'")
    notebook.cell("def f():\n    return STOP_TOKEN, MAX_TOKENS, ANSWER_KEY, TOKENIZER")
    assert notebook.result("f") == "('<|endoftext2|>', 512, 'final_answer', 'a/b-0.5')"
    file = Path(notebook.path_of("f").rpartition(":")[0])
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_function_without_source_or_with_another_one_is_refused(notebook: WrittenNotebook):
    exec("def f():\n    return 1", notebook.names)  # noqa: S102 - as an interpreter does
    assert "the source of f is not known" in notebook.refused("f")
    notebook.cell("def g():\n    return 1")
    file = notebook.names["g"].__code__.co_filename
    linecache.cache[file] = (1, None, ["def g():\n", "    return 2\n"], file)
    assert "the source of g has changed since it was defined; start the script again" in notebook.refused("g")


@pytest.mark.parametrize(
    ("defined", "edited"),
    [
        ("def f(c):\n    return 1.0 if len(c) > 5 else 0.0", "def f(c):\n    return 1.0 if len(c) < 5 else 0.0"),
        ("def f(a, b):\n    return a + b", "def f(a, b):\n    return a - b"),
        (
            "def f(x):\n    return sorted(x, key=lambda y: y + 1)",
            "def f(x):\n    return sorted(x, key=lambda y: y - 1)",
        ),
        (
            "import re\ndef f(x):\n    return re.findall('a', x) + 1",
            "import re\ndef f(x):\n    return re.findall('a', x) - 1",
        ),
        ("def f(x):\n    return 1 if x else 0", "def f(x):\n    return 1 if not x else 0"),
        ("def f(x, n=1):\n    return x", "def f(x, n=2):\n    return x"),
        ("def f(x, *, n=1):\n    return x", "def f(x, *, n=2):\n    return x"),
    ],
)
def test_an_edit_of_any_part_of_a_function_is_noticed(
    notebook: WrittenNotebook, capsys: pytest.CaptureFixture[str], defined: str, edited: str
):
    notebook.cell(defined)
    assert notebook.path_of("f") and "warning" not in capsys.readouterr().err
    file = notebook.names["f"].__code__.co_filename
    linecache.cache[file] = (1, None, edited.splitlines(keepends=True), file)
    try:
        notebook.path_of("f")
    except SettingError as error:
        assert "has changed since" in str(error)
    else:
        assert "the source of f seems to have changed since it was defined" in capsys.readouterr().err


def test_a_function_within_a_condition_is_the_one_that_is_written(notebook: WrittenNotebook):
    notebook.cell('if True:\n    def f(x):\n        """One.\n\n        Two.\n        """\n        return x + 1')
    assert notebook.result("f", 1) == "2"


def test_a_default_value_that_the_script_has_changed_later_is_refused(notebook: WrittenNotebook):
    notebook.cell(
        "LIMIT = 5\nclass A:\n    value = 1\ndef f(x, limit=LIMIT, *, kind=A, more=A.value, cache={}, n=-1):\n    cache[x] = limit"
    )
    notebook.names["f"](2)
    assert notebook.path_of("f")
    notebook.cell("LIMIT = 50")
    with pytest.raises(SettingError, match="reward.path: the default of limit, LIMIT, has changed since f was defined"):
        notebook.path_of("f")


def test_a_constant_is_read_back_as_it_was():
    values = [1, -1.5, 1j, "ä\n", b"\0", True, None, ..., [], (), set(), frozenset({1}), {}, {"a": [(1,), {2: {3}}]}]
    for value in values:
        assert repr(eval(literal(value) or "")) == repr(value)
    assert eval(literal(float("-inf")) or "") == float("-inf")
    for value in (
        object(),
        [object()],
        {1: object()},
        re.compile("a"),
        logging.getLogger("a"),
        type("Text", (str,), {})("a"),
    ):
        assert literal(value) is None
