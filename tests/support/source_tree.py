"""The project's source files as syntax trees, and the graph of their imports."""

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("comm", "relay", "trainer", "rollout", "launch")
SOURCES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
TREES = {path: ast.parse(path.read_text(), filename=str(path)) for path in (*SOURCES, *TESTS)}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Graph = dict[str, set[str]]


def name_of(path: Path) -> str:
    """The dotted name below `headrace` of a source file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path) for path in SOURCES}


def functions(tree: ast.AST) -> Iterator[Function]:
    """All functions and methods, nested ones included."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def imports(path: Path, nodes: Iterable[ast.AST]) -> set[str]:
    """Dotted names below `headrace` that these nodes of a file import relatively."""
    package = name_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            prefix = [*base, *(node.module.split(".") if node.module else [])]
            names = [".".join([*prefix, alias.name]) for alias in node.names]
            found |= {name if name in MODULES else ".".join(prefix) for name in names}
    return found


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: no function bodies, nothing for type checkers alone."""
    waiting: list[ast.AST] = [*ast.iter_child_nodes(tree)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def import_graph(nodes: Callable[[ast.AST], Iterable[ast.AST]] = at_import) -> Graph:
    """Each module with the project's modules that these nodes of it import."""
    return {name_of(path): (imports(path, nodes(TREES[path])) & MODULES) - {name_of(path)} for path in SOURCES}


def circles(graph: Graph) -> Graph:
    """The rest of a graph after modules without imports are removed again and again."""
    while ends := {name for name, targets in graph.items() if not targets}:
        graph = {name: targets - ends for name, targets in graph.items() if name not in ends}
    return graph


def longest_chain(graph: Graph) -> list[str]:
    """The longest chain of modules, each of which imports the next, in a graph without circles."""
    chains: dict[str, list[str]] = {}

    def chain_of(name: str) -> list[str]:
        if name not in chains:
            chains[name] = [name, *max((chain_of(target) for target in sorted(graph[name])), key=len, default=[])]
        return chains[name]

    return max((chain_of(name) for name in sorted(graph)), key=len)


@cache
def texts(path: Path) -> list[str]:
    """The texts of a source file, with `...` for the expressions in them."""
    found: list[str] = []
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found
