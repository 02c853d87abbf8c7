"""Checks of the user's functions by their source, without executing it: a reward's arguments against the data, tools' type hints.

Only a plain `def` or `class` is checked. Anything else is left to the process that loads the file.
"""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from ....comm.errors import SettingError
from ....comm.plugins import source_file
from ....comm.recipe import EnvironmentSettings, RewardSettings
from ....comm.recipe.run import is_address
from ....rollout.environments.tools import RESERVED
from ....rollout.rewards.function import OWN, VERL, has_ground_truth
from ....rollout.rewards.ready import READY


class _Arguments(NamedTuple):
    """The arguments of a function: all names that it takes, those without a default, and whether it takes any others."""

    names: set[str]
    required: list[str]
    takes_any: bool

    @classmethod
    def of(cls, node: ast.FunctionDef | ast.AsyncFunctionDef) -> "_Arguments":
        given = node.args
        by_name = node.args.kwonlyargs
        in_order = [*given.posonlyargs, *given.args]
        required = in_order[: len(in_order) - len(given.defaults)]
        required += [each for each, default in zip(by_name, given.kw_defaults, strict=True) if default is None]
        names = {each.arg for each in (*given.args, *by_name)}
        return cls(names, [each.arg for each in required], given.kwarg is not None)

    @classmethod
    def of_ready(cls, name: str) -> "_Arguments":
        found = list(inspect.signature(READY[name]).parameters)
        return cls(set(found), found, takes_any=False)


def check_reward_arguments(settings: RewardSettings, rows: Sequence[Mapping[str, Any]], source: str) -> list[str]:
    """Each argument that a reward needs is one of the known ones, or a column of a set's first row; `rows` are those of the sets.

    Raises `SettingError` for one that no set of `source`, a setting, has; returns warnings of one that some of them lack.
    """
    warnings: list[str] = []
    for name, path in settings.functions.items():
        if is_address(path):
            continue
        arguments = _Arguments.of_ready(path) if path in READY else _arguments_in(path)
        if arguments is None:
            continue
        problems = [_problem(name, arguments, row, source) for row in rows]
        if problems and all(problems):
            raise SettingError(f"reward.path: {problems[0]}")
        warnings += [f"reward.path: {problem}" for problem in problems if problem]
    return warnings


def _arguments_in(path: str) -> _Arguments | None:
    node = _definition(path)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
        return _Arguments.of(node)
    return None


def _definition(path: str) -> ast.stmt | None:
    """The statement that binds the name in `FILE.py:NAME`, if no other statement of the file binds it too."""
    home, _, name = path.rpartition(":")
    file = source_file(home)
    body = ast.parse(file.read_text(encoding="utf-8"), filename=str(file)).body
    found = [node for node in body if getattr(node, "name", None) == name]
    others = {each.id for node in body for each in ast.walk(node) if isinstance(each, ast.Name) and _is_set(each)}
    return found[0] if len(found) == 1 and name not in others else None


def _is_set(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _problem(name: str, arguments: _Arguments, row: Mapping[str, Any], source: str) -> str:
    """Why the function cannot be called with a row, as `RewardFunction` would call it; empty if it can."""
    columns = sorted(row.keys() - {"prompt"})
    has = f"the first row of {source} has {', '.join(columns) or 'no column but the prompt'}"
    per_sample = "solution_str" in arguments.names
    is_verl = per_sample or "solution_strs" in arguments.names
    verl = VERL if per_sample else {f"{each}s" for each in VERL} if is_verl else set[str]()
    known = OWN | verl | set(columns)
    if missing := [each for each in arguments.required if each not in arguments.names]:
        return f"{name} takes {missing[0]!r} by position; arguments are given by name"
    if missing := [each for each in arguments.required if each not in known]:
        near = get_close_matches(missing[0], sorted(known), n=1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        if missing[0] in VERL and not is_verl:
            hint = "; it is given to a function that takes solution_str"
        return f"{name} needs {missing[0]!r}, which is neither an argument of rewards nor a column; {has}{hint}"
    if verl & {"ground_truth", "ground_truths"} & (verl if arguments.takes_any else arguments.names):
        if not has_ground_truth(row):
            return f"{name} takes a ground truth, from a column ground_truth, answer or solution; {has}"
    elif arguments.takes_any and not is_verl and (clash := sorted(OWN & set(columns))):
        return f"{name} takes every argument, but the column {clash[0]!r} is another one of rewards; rename the column"
    return ""


def check_tools(settings: EnvironmentSettings) -> None:
    """Each tool has what its JSON schema is made of: a docstring, and for each argument a type hint and a description.

    Raises `SettingError`.
    """
    for setting, node in _tool_definitions(settings):
        text = ast.get_docstring(node)
        where = f"{setting}: the tool {node.name}"
        if not text:
            raise SettingError(f"{where} has no docstring, which tells the policy what it does")
        _, _, described = f"\n{text}".partition("\nArgs:")
        given = node.args
        for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs):
            if argument.arg in ("self", "cls"):
                continue
            if argument.annotation is None:
                raise SettingError(f"{where} has no type hint for its argument {argument.arg!r}")
            if not re.search(rf"^\s*{argument.arg}:", described, re.MULTILINE):
                raise SettingError(
                    f"{where} does not describe its argument {argument.arg!r}: its docstring needs a line"
                    f" `{argument.arg}: ...` below `Args:`"
                )


def _tool_definitions(settings: EnvironmentSettings) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The tools whose definitions are in the files: functions, and the public methods of an environment without `step`."""
    own = settings.user_code
    for path in (path for path in settings.tools if path in own):
        if isinstance(node := _definition(path), ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
            yield "environment.tools", node
    owner = _definition(settings.path) if settings.path in own else None
    if isinstance(owner, ast.ClassDef) and not owner.bases:
        methods = [node for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        if "step" not in {method.name for method in methods}:
            for node in methods:
                if not (node.name.startswith("_") or node.name in RESERVED or node.decorator_list):
                    yield "environment.path", node
