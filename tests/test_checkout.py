"""A checkout is enough by itself: none of its files names a path above it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.assets import ASSETS
from support.source_tree import FLOORS, ROOT, TREES

TEXT = {".cfg", ".json", ".md", ".sbatch", ".sh", ".toml", ".txt", ".yaml", ""}
UPWARDS = re.compile(r"""(?:(?<=dirname "\$0"\))|(?<=\[0\]\}"\))|(?<![^\s"'`(=]))/?((?:\.\./)*\.\.)(?![.\w])""")
"""Steps up from the file's own folder: after its name in a script, or at the head of a path."""
MAX_ASSET_BYTES = 2_000_000


def texts() -> Iterator[Path]:
    """The text files of the repository that are not Python."""
    for folder in (*FLOORS, "tests", "docs", ".ci"):
        yield from (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix in TEXT)
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.suffix in TEXT)


def steps_up(node: ast.AST) -> int | None:
    """How far `node` climbs from a module's file, as `Path(__file__).parents[1].parent` climbs 3; None where it does not."""
    if isinstance(node, ast.Name) and node.id == "__file__":
        return 0
    if isinstance(node, ast.Call):
        inner = node.func.value if isinstance(node.func, ast.Attribute) else None
        found = [steps_up(part) for part in (inner, *node.args) if part is not None]
        steps = max((steps for steps in found if steps is not None), default=None)
        return steps if steps is None or not ast.unparse(node.func).endswith("dirname") else steps + 1
    if isinstance(node, ast.Attribute) and node.attr == "parent":
        steps = steps_up(node.value)
        return None if steps is None else steps + 1
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "parents":
        steps = steps_up(node.value.value)
        return None if steps is None else steps + 1 + ast.literal_eval(node.slice)
    return None


def climbs(path: Path, text: str, tree: ast.AST | None) -> list[str]:
    """The parts of a file that lead above the root of the checkout."""
    depth = len(path.relative_to(ROOT).parts)
    if tree is not None:
        return [
            ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.expr) and (steps_up(node) or 0) > depth
        ]
    return [found[0] for found in UPWARDS.finditer(text) if found[1].count("..") >= depth]


def test_no_file_names_a_path_above_the_checkout():
    for path, tree in TREES.items():
        assert not climbs(path, "", tree), path
    for path in texts():
        assert not climbs(path, path.read_text(), None), path


@pytest.mark.parametrize(
    ("name", "text", "is_refused"),
    [
        ("tests/a.py", "Path(__file__).resolve().parents[1]", False),
        ("tests/a.py", "Path(__file__).resolve().parents[2]", True),
        ("tests/a.py", "Path(__file__).resolve().parents[1].parent / 'x'", True),
        ("tests/a.py", "os.path.join(Path(__file__).parent.parent.parent)", True),
        ("tests/a.py", "os.path.dirname(os.path.dirname(__file__))", False),
        ("tests/a.py", "os.path.dirname(os.path.dirname(os.path.dirname(__file__)))", True),
        ("launch/a.sh", 'cd "$(dirname "${BASH_SOURCE[0]}")/.."', False),
        ("launch/a.sh", 'cd "$(dirname "${BASH_SOURCE[0]}")/../.."', True),
        ("launch/a.sh", 'cd "$(dirname "$0")/../../other"', True),
        ("README.md", "in `../shared` there is", True),
        ("docs/a.md", "[the log](../CHANGELOG.md)", False),
        ("docs/a.md", "[the log](../../CHANGELOG.md)", True),
        ("docs/a.md", "`eval/response_length/mean`, `.../clip_ratio`", False),
    ],
)
def test_a_path_above_the_checkout_is_found(name: str, text: str, is_refused: bool):
    tree = ast.parse(text) if name.endswith(".py") else None
    assert bool(climbs(ROOT / name, text, tree)) == is_refused


OWN_ASSETS = {"histories"}
"""Made in this repository, under its own licence."""


def test_each_asset_from_elsewhere_has_its_licence_and_all_are_small():
    foreign = [path for path in ASSETS.iterdir() if path.is_dir() and path.name not in OWN_ASSETS]
    assert {path.name for path in foreign} == {"gsm8k", "stories260k"}
    assert all("Permission is hereby granted" in (path / "LICENSE").read_text() for path in foreign)
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) < MAX_ASSET_BYTES
