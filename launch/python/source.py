"""The source of a caller's functions, as a file that another process can load.

A function of a script or of a notebook's cells is written with everything that it uses there: imports, other functions, classes, and
constants with their present values. Things without source, such as a lambda, a closure or an object of the script, are refused by name.
"""

import __future__

import ast
import dis
import inspect
import linecache
import logging
import os
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from ...comm.errors import SettingError
from ..processes.child import print_message

_FUTURE = "from __future__ import annotations"
_CONTAINERS: Mapping[type, tuple[str, str]] = {
    list: ("[", "]"), tuple: ("(", ",)"), set: ("{", "}"), frozenset: ("frozenset([", "])"),
}  # fmt: skip
_SECRET_NAME = re.compile(r"(.*_)?(api_?)?(key|token|secret|passw(or)?d|credential)s?(_.*)?", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"(?=.*\d)[\w+/=.:-]{8,}")
"""Names of secrets, and how one looks: long, in one word, with a digit. `STOP_TOKEN = "</s>"` does not look like one."""
_PREPARING = ("EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL")
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_PLAIN = (
    ast.Constant, ast.Name, ast.Attribute, ast.Tuple, ast.UnaryOp, ast.BinOp, ast.expr_context, ast.operator, ast.unaryop,
)  # fmt: skip
"""Parts of an expression that has the same value each time, unless its names have got others."""
_MODULE = "put it into a module (a file such as my_rewards.py) and import it from there"


class _Module(NamedTuple):
    """A module that another process can import, with the folder that it is found in, empty where Python finds it by itself."""

    name: str
    folder: str


class SourceFile:
    """The text of a Python file that grows by what is added: functions and classes of one script or notebook."""

    def __init__(self, scope: Mapping[str, Any]) -> None:
        """scope: the global names of the script or notebook."""
        self.scope = scope
        self._imports: dict[str, None] = {}
        self._folders: dict[str, None] = {}
        self._needs_future = False
        self._done: dict[str, Any] = {}
        self._parts: list[str] = []

    def add(self, setting: str, thing: Any) -> str:
        """Add a function or class, and what it uses; returns its name in the file. Raises `SettingError` with `setting`."""
        original = inspect.unwrap(thing)
        _check_kind(setting, thing, original)
        name = original.__name__
        self._define(setting, name, thing)
        return name

    def text(self, title: str) -> str:
        """The whole file; `title` is its first line."""
        folders = [f"sys.path.insert(0, {folder!r})" for folder in self._folders]
        head = [f'"""{title}"""', *([_FUTURE] if self._needs_future else []), *(["import sys"] if folders else [])]
        return "\n\n".join(["\n".join([*head, *folders, *self._imports]), *self._parts]) + "\n"

    def _define(self, setting: str, name: str, thing: Any) -> None:
        """Write what binds a name of the script, once."""
        if self._claim(setting, name, thing):
            return
        original = inspect.unwrap(thing) if callable(thing) else thing
        if isinstance(thing, ModuleType):
            self._import(setting, thing, f"import {thing.__name__}" + (f" as {name}" if thing.__name__ != name else ""))
        elif (home := importable(thing)) is not None:
            self._import_from(setting, name, thing, home)
        elif isinstance(original, FunctionType | type):
            _check_kind(setting, thing, original)
            if original.__name__ == name:
                self._write(setting, original)
            else:
                self._define(setting, original.__name__, thing)
                self._parts.append(f"{name} = {original.__name__}")
        elif (value := self._literal(thing)) is not None:
            _refuse_secret(setting, name, thing, value)
            self._parts.append(f"{name} = {value}")
        else:
            raise SettingError(
                f"{setting}: the function uses {name}, an object of type {type(thing).__name__} that the script has made and"
                f" that cannot be written into a file; make it inside the function, or {_MODULE}"
            )

    def _claim(self, setting: str, name: str, thing: Any) -> bool:
        """Whether a name is written already. Raises `SettingError` if it is that of another object."""
        if name in self._done and self._done[name] is not thing:
            raise SettingError(f"{setting}: two different objects of the script are named {name}; rename one of them")
        is_done = name in self._done
        self._done[name] = thing
        return is_done

    def _import_from(self, setting: str, name: str, thing: Any, home: _Module) -> None:
        outer, dot, inner = thing.__qualname__.partition(".")
        bound = f"_{name}" if dot else name
        alias = f" as {bound}" if bound != outer else ""
        self._import(setting, sys.modules[thing.__module__], f"from {home.name} import {outer}{alias}")
        if dot:
            self._parts.append(f"{name} = {bound}.{inner}")

    def _write(self, setting: str, thing: Any) -> None:
        """Write a function or class of the script after what it uses."""
        source = _source_of(setting, thing)
        tree = ast.parse(source)
        if isinstance(thing, FunctionType):
            future = thing.__code__.co_flags & __future__.annotations.compiler_flag
            self._needs_future |= bool(future)
            _check_unchanged(setting, thing, compile(tree, "<function>", "exec", future, dont_inherit=True))
            _check_defaults(setting, thing, tree)
        # Without the future import, so that the names in annotations are among those used: a tool's schema needs them.
        for name in _global_names(compile(tree, "<function>", "exec", dont_inherit=True)):
            is_own = name == thing.__name__ or (name.startswith("__") and name != "__file__")
            if name in self.scope and not is_own:
                self._define(setting, name, self.scope[name])
                if isinstance(module := self.scope[name], ModuleType):
                    self._import_inner(module, name, tree)
        self._parts.append(source.strip("\n"))

    def _import(self, setting: str, module: ModuleType, line: str) -> None:
        found = home_of(module)
        if found is None:
            raise SettingError(
                f"{setting}: the function uses the module {module.__name__}, which has no file to import it from"
            )
        if found.folder:
            self._folders[found.folder] = None
        self._imports[line] = None

    def _import_inner(self, module: ModuleType, name: str, tree: ast.AST) -> None:
        """Import the modules within a module that the source names, such as `etree.ElementTree` of `xml`."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                first, *rest = ast.unparse(node).split(".")
                inner = ".".join([module.__name__, *rest])
                if first == name and inner in sys.modules:
                    self._imports[f"import {inner}"] = None

    def _literal(self, value: Any) -> str | None:
        """The source of a constant; None for any other value."""
        if isinstance(value, re.Pattern):
            self._imports["import re"] = None
            return f"re.compile({value.pattern!r}, {value.flags})"
        if isinstance(value, PurePath):
            self._imports["import pathlib"] = None
            return f"pathlib.{type(value).__name__}({str(value)!r})"
        if isinstance(value, logging.Logger):
            self._imports["import logging"] = None
            return f"logging.getLogger({value.name!r})"
        return literal(value)


def _refuse_secret(setting: str, name: str, value: Any, source: str) -> None:
    """Refuse a constant that looks like a secret, or that holds one of the environment: the run folder is copied and shared."""
    is_secret = isinstance(value, str) and _SECRET_NAME.fullmatch(name) and _SECRET_VALUE.fullmatch(value)
    known = (each for key, each in os.environ.items() if _SECRET_NAME.fullmatch(key) and _SECRET_VALUE.fullmatch(each))
    if is_secret or any(each in source for each in known):
        raise SettingError(
            f"{setting}: the function uses {name}, which looks like a secret and would be written into the run folder; read it inside"
            ' the function, with os.environ["NAME"]'
        )


def literal(value: Any) -> str | None:
    """The source of a number, a text, a truth value, None, or a container of these; None for any other value."""
    kind = type(value)
    if kind is float:
        return repr(value) if abs(value) < float("inf") else f"float({str(value)!r})"
    if kind in (int, complex, str, bytes, bool) or value is None or value is ...:
        return repr(value)
    if kind is dict:
        pairs = [(literal(key), literal(each)) for key, each in value.items()]
        return (
            None
            if any(None in pair for pair in pairs)
            else "{" + ", ".join(f"{key}: {each}" for key, each in pairs) + "}"
        )
    if kind not in _CONTAINERS:
        return None
    parts = [literal(each) for each in value]
    if None in parts:
        return None
    if not parts:
        return f"{kind.__name__}()"
    opening, closing = _CONTAINERS[kind]
    return opening + ", ".join(filter(None, parts)) + closing


def importable(thing: Any) -> _Module | None:
    """The module that another process can import a function or class from; None if it has none, as those of the script."""
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    names = getattr(thing, "__qualname__", "")
    if module is None or not names:
        return None
    found: Any = module
    for name in names.split("."):
        found = getattr(found, name, None)
    return home_of(module) if found is thing else None


def home_of(module: ModuleType) -> _Module | None:
    """Name and folder of a module; None for the script itself, and for one that was not loaded from anywhere."""
    spec = getattr(module, "__spec__", None)
    if spec is None or module.__name__ == "__main__":
        return None
    if not spec.has_location or spec.origin is None:
        return _Module(spec.name, "")
    is_package = spec.submodule_search_locations is not None
    folder = Path(spec.origin).parents[spec.name.count(".") + is_package]
    paths = sysconfig.get_paths()
    is_found = any(folder.is_relative_to(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return _Module(spec.name, "" if is_found else str(folder))


def _check_kind(setting: str, thing: Any, original: Any) -> None:
    """Refuse what has no source of its own."""
    name = getattr(original, "__name__", type(thing).__name__)
    if isinstance(thing, MethodType):
        raise SettingError(
            f"{setting}: {name} is a method of an object, which stays in this process; write a function, or {_MODULE}"
        )
    if not isinstance(original, FunctionType | type):
        raise SettingError(
            f"{setting}: an object of type {type(thing).__name__} is not a function; write one with def, or {_MODULE}"
        )
    if name == "<lambda>":
        raise SettingError(f"{setting}: a lambda has no name; write a function with def")
    if isinstance(original, FunctionType) and (free := original.__code__.co_freevars):
        where = original.__qualname__.partition(".")[0]
        raise SettingError(
            f"{setting}: {name} uses {', '.join(free)}, local to {where}(), which is not in its source; define {name} outside of"
            f" {where}(), with constants of the script in place of local variables (if {where} is a decorator, it needs functools.wraps)"
        )
    if isinstance(original, type) and "<locals>" in original.__qualname__:
        raise SettingError(
            f"{setting}: the class {name} is defined within a function; define it at the top of the script"
        )


def _source_of(setting: str, thing: Any) -> str:
    """The source of a function or class of the script, with its decorators. Raises `SettingError` without one."""
    try:
        source = inspect.getsource(thing) if isinstance(thing, FunctionType) else _class_source(thing)
    except (OSError, TypeError):
        raise SettingError(
            f"{setting}: the source of {thing.__name__} is not known, as of code that was typed into an interpreter; {_MODULE}"
        ) from None
    return textwrap.dedent(source)


def _class_source(owner: type) -> str:
    """The source of a class. `inspect` finds none in a notebook, where `__main__` has no file. Raises `OSError`."""
    module = sys.modules.get(owner.__module__)
    methods = [each.__code__.co_filename for each in vars(owner).values() if isinstance(each, FunctionType)]
    cells = [name for name, entry in reversed([*linecache.cache.items()]) if len(entry) > 1 and entry[1] is None]
    for file in (*methods, *filter(None, [getattr(module, "__file__", None)]), *cells):
        lines = linecache.getlines(file)
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:  # a cell with a command of the notebook
            continue
        for node in reversed(tree.body):
            if isinstance(node, ast.ClassDef) and node.name == owner.__name__:
                first = min(each.lineno for each in (node, *node.decorator_list))
                return "".join(lines[first - 1 : node.end_lineno])
    raise OSError


def _check_unchanged(setting: str, function: FunctionType, code: CodeType) -> None:
    """The source is that of the function: a script may have been edited while it runs.

    Other names or constants are refused. Other instructions are a warning, since the same source may be compiled in several ways.
    """
    name = function.__name__
    written = [each for each in _codes(code) if each.co_name == name]
    alike = [each for each in written if _gist(each) == _gist(function.__code__)]
    if not alike:
        raise SettingError(f"{setting}: the source of {name} has changed since it was defined; start the script again")
    if not any(_steps(each) == _steps(function.__code__) for each in alike):
        print_message(
            f"warning: {setting}: the source of {name} seems to have changed since it was defined; the run takes the source as it is now"
        )


def _gist(code: CodeType) -> tuple[Any, ...]:
    """The parts of compiled code that are the same for the same source at any place in a file."""
    constants: list[Any] = [
        _gist(each) if isinstance(each, CodeType) else (type(each), each) for each in code.co_consts
    ]
    if code.co_consts and isinstance(doc := code.co_consts[0], str):  # that of a function within an `if` is indented
        constants[0] = inspect.cleandoc(doc)
    return code.co_names, code.co_varnames, constants


def _steps(code: CodeType) -> list[Any]:
    """The instructions, with those of the functions within.

    A call of an imported module's function is compiled in another way in the file that has the import than in another cell. So
    instructions are compared by their names and values, without those that only prepare a call, and without the lengths of jumps.
    """
    return [
        (each.opname.replace("LOAD_METHOD", "LOAD_ATTR"), None if each.opcode in _JUMPS else each.argval)
        for part in _codes(code)
        for each in dis.get_instructions(part)
        if each.opname not in _PREPARING and not isinstance(each.argval, CodeType)
    ]


def _check_defaults(setting: str, function: FunctionType, tree: ast.Module) -> None:
    """The defaults have the values that the source gives them in another process, where constants have their present values."""
    node = tree.body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    positional = [*node.args.posonlyargs, *node.args.args]
    given = node.args.defaults
    values = {each.arg: value for each, value in zip(positional[len(positional) - len(given) :], given, strict=True)}
    values |= {
        each.arg: value for each, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value
    }
    names = [each.arg for each in positional]
    kept = function.__defaults__ or ()
    bound = dict(zip(names[len(names) - len(kept) :], kept, strict=True)) | (function.__kwdefaults__ or {})
    for argument, value in values.items():
        # Calls, and containers that a function may fill, are as they are written.
        if not all(isinstance(each, _PLAIN) for each in ast.walk(value)):
            continue
        try:
            now = eval(compile(ast.Expression(value), "<default>", "eval"), dict(function.__globals__))
            is_same = bound[argument] is now or (
                type(now) is type(bound[argument]) and (now == bound[argument]) is True
            )
        except (NameError, AttributeError, TypeError, ArithmeticError, KeyError):
            is_same = False
        if not is_same:
            raise SettingError(
                f"{setting}: the default of {argument}, {ast.unparse(value)}, has changed since {function.__name__} was defined;"
                f" define {function.__name__} again"
            )


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _global_names(code: CodeType) -> Iterable[str]:
    """The global names that code uses, each once, in its order."""
    loads = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    used = (each for inner in _codes(code) for each in dis.get_instructions(inner) if each.opname in loads)
    return dict.fromkeys(each.argval for each in used)
