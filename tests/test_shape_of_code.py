"""The house's measures: sizes, words, directions. A file that fails here is to be cut, not the limit raised."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("comm", "relay", "trainer", "rollout", "launch")
MAY_IMPORT = {
    "comm": {"comm"},
    "relay": {"comm", "relay"},
    "trainer": {"comm", "relay", "trainer"},
    "rollout": {"comm", "relay", "rollout"},
    "launch": set(FLOORS),
}
POLICY = {f"trainer.policy.{path.stem}" for path in (ROOT / "trainer/policy").glob("[a-z]*.py")}
"""The policy's one definition, which the rollout runs as well: the only way from one upper floor to another."""

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES, P90_FUNCTION_LINES = 60, 30
MAX_PUBLIC_NAMES, USUAL_PUBLIC_NAMES = 12, 8
MIN_TEST_SHARE = 0.45

SOURCES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
TREES = {path: ast.parse(path.read_text(), filename=str(path)) for path in SOURCES}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    """The dotted name below `headrace` of a source file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length(node: Function) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def imports(path: Path, nodes: Iterator[ast.AST]) -> set[str]:
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
            known = {name_of(source) for source in SOURCES}
            found |= {name if name in known else ".".join(prefix) for name in names}
    return found


def at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: no function bodies, nothing for type checkers alone."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def public_names(path: Path) -> list[str]:
    """Functions and classes that a module offers; a collection of many like things counts as one."""
    if path.name.endswith(("errors.py", "protocol.py", "events.py", "recipe.py")) or path.parent.name == "messages":
        return []
    return [n.name for n in TREES[path].body if isinstance(n, Function | ast.ClassDef) and not n.name.startswith("_")]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_is_one_noun_and_short(path: Path):
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    assert len(public_names(path)) <= MAX_PUBLIC_NAMES


def test_few_modules_offer_many_names():
    many = [name_of(path) for path in SOURCES if len(public_names(path)) > USUAL_PUBLIC_NAMES]
    assert len(many) <= 0.03 * len(SOURCES), many


def test_functions_are_short():
    long = {
        f"{name_of(path)}.{node.name}": length(node)
        for path, tree in TREES.items()
        for node in functions(tree)
        if length(node) > MAX_FUNCTION_LINES
    }
    assert not long
    lengths = sorted(length(node) for tree in TREES.values() for node in functions(tree))
    assert lengths[int(0.9 * len(lengths))] <= P90_FUNCTION_LINES


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_everything_public_says_what_it_is(path: Path):
    tree = TREES[path]
    public = [n for n in tree.body if isinstance(n, Function | ast.ClassDef) and not n.name.startswith("_")]
    silent = [node.name for node in public if not ast.get_docstring(node)]
    assert path.stat().st_size == 0 or ast.get_docstring(tree)
    assert not silent


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_argument_and_result_has_a_type(path: Path):
    bare: list[str] = []
    for node in functions(TREES[path]):
        if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue  # a kernel's arguments have the types of its compiler
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        bare += [f"{node.name}({a.arg})" for a in named if a and a.annotation is None and a.arg not in ("self", "cls")]
        bare += [f"{node.name}()" for _ in [0] if node.returns is None]
    assert not bare


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_only_go_down(path: Path):
    floor = name_of(path).partition(".")[0]
    targets = imports(path, ast.walk(TREES[path]))
    outside = {target for target in targets if target.partition(".")[0] not in MAY_IMPORT[floor]}
    assert not outside - (POLICY if floor == "rollout" else set())
    if name_of(path) in POLICY:
        assert (
            not {target for target in targets if target.startswith("trainer.") and target != "trainer.policy"} - POLICY
        )


def test_no_modules_import_each_other_in_a_circle():
    graph = {name_of(path): imports(path, at_import(tree)) & {*map(name_of, SOURCES)} for path, tree in TREES.items()}
    while ends := [name for name, targets in graph.items() if not targets]:
        for name in ends:
            del graph[name]
        graph = {name: targets - {*ends} for name, targets in graph.items()}
    assert not graph, f"among these: {sorted(graph)}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_is_unpickled_and_no_error_is_swallowed_unseen(path: Path):
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: a bare except"
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not {"pickle", "cloudpickle", "dill", "shelve", "marshal"} & {m.partition(".")[0] for m in modules}
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
        if isinstance(node, ast.Call):
            assert "_object_list" not in ast.unparse(node.func), f"line {node.lineno}: a collective that pickles"


def test_tests_are_sentences_and_no_small_part_of_the_code():
    files = sorted((ROOT / "tests").rglob("*.py"))
    names = [
        node.name for path in files for node in functions(ast.parse(path.read_text())) if node.name.startswith("test_")
    ]
    assert not [name for name in names if name.count("_") < 3]
    source, tests = (sum(len(path.read_text().splitlines()) for path in paths) for paths in (SOURCES, files))
    assert tests >= MIN_TEST_SHARE * source


def test_the_five_folders_are_never_imported_by_their_bare_names():
    code = "import sys, headrace.launch.run, headrace.launch.processes.worker; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {module.partition(".")[0] for module in done.stdout.split()} & {*FLOORS}


def test_type_checkers_and_editors_find_the_import_name():
    assert (ROOT / ".types" / "headrace").resolve() == ROOT


def test_floors_stand_in_the_order_of_their_imports():
    assert all(MAY_IMPORT[low] <= MAY_IMPORT[high] for low, high in pairwise(("comm", "relay", "trainer", "launch")))
