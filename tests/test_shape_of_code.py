"""The house's measures: sizes, names, words. They catch what grows by accident; none of them is worth squeezing code for."""

import ast
from collections import defaultdict
from pathlib import Path

from support.source_tree import FLOORS, ROOT, SOURCES, TESTS, TREES, Function, functions, name_of

MAX_FILE_LINES = 460
"""Some room above the longest file of today, so that no file is squeezed or split only to fit."""
MAX_FUNCTION_LINES = 60
P90_FUNCTION_LINES = 30
MAX_PUBLIC_NAMES, USUAL_PUBLIC_NAMES = 12, 8
MAX_ENTRIES, MAX_RELAY_ENTRIES = 23, 10
"""The most are in `launch`, which has an entry for each command."""
COLLECTIONS = ("errors.py", "protocol.py", "events.py")
"""Files that hold many like things, which count as one."""
UNBOUNDED = {"wait", "get", "join", "result", "communicate", "acquire", "exception"}
"""Calls that wait for ever when they get no argument."""
COLLECTIVES = "trainer.policy.tensor_parallel"
"""Its waits are bounded by the timeout of their process group; a bound in NCCL's `wait` would block the host."""


def length(node: Function) -> int:
    """Lines of a function, its signature included."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def public_definitions(path: Path) -> list[Function | ast.ClassDef]:
    """Functions and classes that a module offers."""
    found = [node for node in TREES[path].body if isinstance(node, Function | ast.ClassDef)]
    return [node for node in found if not node.name.startswith("_")]


def num_public_names(path: Path) -> int:
    """How many names a reader meets in a module; a collection of many like things counts as one."""
    is_collection = path.name in COLLECTIONS or path.parent.name in ("messages", "recipe")
    return 1 if is_collection else len(public_definitions(path))


def test_a_file_is_one_noun_and_short():
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= MAX_FILE_LINES, name_of(path)
        assert num_public_names(path) <= MAX_PUBLIC_NAMES, name_of(path)
    many = [name_of(path) for path in SOURCES if num_public_names(path) > USUAL_PUBLIC_NAMES]
    assert len(many) <= 0.04 * len(SOURCES), many


def test_a_folder_has_few_entries():
    for folder in {parent for path in SOURCES for parent in path.parents if ROOT in parent.parents}:
        entries = {path.name for path in folder.iterdir()} - {"__init__.py", "__pycache__"}
        assert len(entries) <= (MAX_RELAY_ENTRIES if folder.name == "relay" else MAX_ENTRIES), folder


def test_functions_are_short():
    lengths = {f"{name_of(path)}.{node.name}": length(node) for path in SOURCES for node in functions(TREES[path])}
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES}
    assert sorted(lengths.values())[int(0.9 * len(lengths))] <= P90_FUNCTION_LINES


def test_assignments_do_not_pack_unrelated_values():
    """`a, b = x, y` saves a line but is harder to read. Swaps do not count."""
    total, packed = 0, []
    for path in SOURCES:
        for node in ast.walk(TREES[path]):
            if not isinstance(node, ast.Assign):
                continue
            total += 1
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                is_swap = sorted(map(ast.unparse, target.elts)) == sorted(map(ast.unparse, value.elts))
                packed += [] if is_swap else [f"{name_of(path)}:{node.lineno}"]
    assert len(packed) <= 0.01 * total, packed


def test_every_file_says_what_it_is_about_and_so_does_everything_public():
    for path in (*SOURCES, *TESTS):
        assert ast.get_docstring(TREES[path]), f"{path.relative_to(ROOT)} has no docstring at its head"
    for path in SOURCES:
        silent = [node.name for node in public_definitions(path) if not ast.get_docstring(node)]
        assert not silent, name_of(path)


def test_a_folder_says_in_at_least_three_lines_what_it_is_what_holds_and_where_to_start():
    for path in (path for path in SOURCES if path.name == "__init__.py"):
        text = ast.get_docstring(TREES[path]) or ""
        assert len(text.splitlines()) >= 3, name_of(path)


def test_a_class_name_means_one_thing_within_a_floor():
    places: dict[tuple[str, str], set[Path]] = defaultdict(set)
    for path in SOURCES:
        for node in public_definitions(path):
            if isinstance(node, ast.ClassDef):
                places[name_of(path).partition(".")[0], node.name].add(path)
    assert not {name: [*map(name_of, paths)] for name, paths in places.items() if len(paths) > 1}


def test_every_argument_and_result_has_a_type():
    for path in SOURCES:
        for node in functions(TREES[path]):
            if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue  # a kernel's arguments have the types of its compiler
            given = node.args
            named = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            bare = [a.arg for a in named if a and a.annotation is None and a.arg not in ("self", "cls")]
            assert node.returns is not None and not bare, f"{name_of(path)}.{node.name}({', '.join(bare)})"


def test_no_constructor_starts_a_thread():
    for path in SOURCES:
        for owner in (node for node in ast.walk(TREES[path]) if isinstance(node, ast.ClassDef)):
            for method in (
                m for m in owner.body if isinstance(m, Function) and m.name in ("__init__", "__post_init__")
            ):
                calls = [ast.unparse(node.func) for node in ast.walk(method) if isinstance(node, ast.Call)]
                assert not [call for call in calls if call.endswith(".start")], f"{name_of(path)}.{owner.name}"


def test_every_wait_has_a_deadline():
    for path in (path for path in SOURCES if name_of(path) != COLLECTIVES):
        for node in ast.walk(TREES[path]):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            is_bounded = any(word.arg == "timeout" for word in node.keywords)
            is_bare = node.func.attr in UNBOUNDED and not node.args and not node.keywords
            is_bare |= node.func.attr == "wait_for" and len(node.args) < 2 and not is_bounded
            assert not is_bare, f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}"


def test_one_module_makes_memory_without_a_name():
    calls = {name_of(path) for path in SOURCES if "memfd_create(" in path.read_text()}
    assert calls == {"comm.memfd"}


def test_frames_have_one_form():
    names = ("encode_head", "decode_head", "encode_message", "decode_body")
    homes = {name_of(path) for path in SOURCES for node in functions(TREES[path]) if node.name in names}
    encoders = {name_of(path) for path in SOURCES if "msgpack.Encoder(" in path.read_text()}
    assert homes == encoders == {"comm.frames"}


READER = "trainer.checkpoint_reader"
"""The one module that reads pickles, which DCP writes: through an unpickler that knows every name which it may meet."""


def test_the_one_unpickler_takes_every_name_from_its_list():
    tree = TREES[next(path for path in SOURCES if name_of(path) == READER)]
    owners = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    unpicklers = [owner for owner in owners if "pickle.Unpickler" in map(ast.unparse, owner.bases)]
    assert [[getattr(member, "name", "") for member in owner.body] for owner in unpicklers] == [["find_class"]]
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {name for name in used if name.startswith("pickle.")} == {"pickle.Unpickler", "pickle.UnpicklingError"}
    loads = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "load"]
    assert [{"storage_reader", "planner"} <= {word.arg for word in call.keywords} for call in loads] == [True]


def test_nothing_is_unpickled_and_no_error_is_swallowed_unseen():
    for path in SOURCES:
        for node in ast.walk(TREES[path]):
            where = f"{name_of(path)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{where}: a bare except"
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                picklers = {"pickle", "cloudpickle", "dill", "shelve", "marshal"} & {m.split(".")[0] for m in modules}
                picklers |= {m for m in modules if m.endswith("checkpoint.state_dict_loader")}  # DCP's own unpickles
                assert not picklers or name_of(path) == READER, f"{where}: {picklers}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert any(w.arg == "weights_only" and ast.unparse(w.value) == "True" for w in node.keywords), where
            if isinstance(node, ast.Call):
                assert "_object_list" not in ast.unparse(node.func), f"{where}: a collective that pickles"


def test_no_test_imports_another_test():
    for path in TESTS:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert not node.module.rpartition(".")[2].startswith("test_"), f"{path.name} imports {node.module}"
    assert all((ROOT / "tests" / floor).is_dir() for floor in FLOORS)
