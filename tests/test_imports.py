"""Directions: which floor, folder and file may import which."""

import ast
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from support.source_tree import (
    FLOORS,
    ROOT,
    SOURCES,
    TREES,
    circles,
    import_graph,
    imports,
    longest_chain,
    name_of,
)

MAY_IMPORT = {
    "comm": {"comm"},
    "relay": {"comm", "relay"},
    "trainer": {"comm", "relay", "trainer"},
    "rollout": {"comm", "relay", "rollout"},
    "launch": set(FLOORS),
}
POLICY = "trainer.policy"
"""The policy's one definition, which the rollout runs as well: the only way from one upper floor to another."""
FOLDERS = (
    ("comm.messages", "comm.links", "comm.storage"),
    ("relay.journal", "relay.queue", "relay.hub"),
    ("relay.journal", "relay.weights", "relay.hub"),
    ("trainer.policy", "trainer.algorithms", "trainer.learners"),
    ("rollout.engine", "rollout.tensor_parallel", "rollout.generators", "rollout.migration"),
    ("rollout.engine", "rollout.user_code", "rollout.rewards", "rollout.generators"),
    ("rollout.user_code", "rollout.environments", "rollout.generators"),
    ("rollout.engine", "rollout.generators", "rollout.serving"),
    ("launch.config", "launch.processes"),
)
"""Folders of one floor, lowest first."""
LAB = "launch.lab"
MAX_CHAIN = 12
"""Files. Before snapshots it was 11: msgspec has to see the types of the whole hub state, so its records import the events."""


def test_imports_only_go_down():
    for path in SOURCES:
        floor = name_of(path).partition(".")[0]
        for target in imports(path, ast.walk(TREES[path])):
            is_below = target.partition(".")[0] in MAY_IMPORT[floor]
            assert is_below or (floor == "rollout" and target.startswith(POLICY)), f"{name_of(path)} -> {target}"


def test_the_policy_imports_nothing_else_of_the_trainer():
    for path in SOURCES:
        if name_of(path).startswith(POLICY):
            targets = {target for target in imports(path, ast.walk(TREES[path])) if target.startswith("trainer")}
            assert all(target.startswith(POLICY) for target in targets), name_of(path)


@pytest.mark.parametrize("order", FOLDERS, ids="-".join)
def test_a_folder_imports_nothing_of_the_folders_above_it(order: tuple[str, ...]):
    graph = import_graph(ast.walk)
    for index, folder in enumerate(order):
        for name in (name for name in graph if f"{name}.".startswith(f"{folder}.")):
            above = {
                target for target in graph[name] if f"{target}.".startswith(tuple(f"{f}." for f in order[index + 1 :]))
            }
            assert not above, f"{name} -> {above}"


def test_no_other_folder_imports_the_lab():
    """A recipe that names an emulated engine loads it by its path."""
    graph = import_graph(ast.walk)
    for name in (name for name in graph if not name.startswith(LAB)):
        assert not [target for target in graph[name] if target.startswith(LAB)], name


def test_the_product_imports_nothing_of_the_tests():
    for path in SOURCES:
        for node in ast.walk(TREES[path]):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not {name.partition(".")[0] for name in named} & {"bench", "simulation", "support", "tests"}, (
                name_of(path)
            )


def test_no_modules_import_each_other_in_a_circle_even_when_they_run_or_for_types_alone():
    left = circles(import_graph(ast.walk))
    assert not left, f"among these: {sorted(left)}"


def test_no_chain_of_imports_is_long():
    chain = longest_chain(import_graph())
    assert len(chain) <= MAX_CHAIN, " -> ".join(chain)


def test_the_five_folders_are_never_imported_by_their_bare_names():
    code = "import sys, headrace.launch.start, headrace.launch.processes.role_process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {module.partition(".")[0] for module in done.stdout.split()} & {*FLOORS}


def test_a_relay_serves_weights_without_torch():
    """Only an NCCL or Gloo link, and memory that is pinned for a GPU, import it, when they are made."""
    graph = import_graph()
    found = {"relay.weights.server"}
    while new := {target for name in found for target in graph[name]} - found:
        found |= {target for target in new if target.startswith(("relay.weights", "comm.links"))}
        if not new & found:
            break
    trees = {name_of(path): TREES[path] for path in SOURCES}
    nodes = [
        (name, node) for name in found for node in trees[name].body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert len(found) > 10
    assert not [name for name, node in nodes if ast.unparse(node).split()[1].partition(".")[0] == "torch"]


def test_the_package_joins_the_five_folders():
    links = {path.name: path.readlink() for path in (ROOT / "src" / "headrace").iterdir() if path.is_symlink()}
    assert links == {floor: Path("../..") / floor for floor in FLOORS}


def test_floors_stand_in_the_order_of_their_imports():
    assert all(MAY_IMPORT[low] <= MAY_IMPORT[high] for low, high in pairwise(("comm", "relay", "trainer", "launch")))
