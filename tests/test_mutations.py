"""The lists of mutations are true of the present source, and the command that runs them tells killed from survived."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from support.mutations import mutations
from support.source_tree import ROOT, TREES, functions

ALL = mutations()
EXAMPLES = """
[[mutation]]
name = "a message is encoded as another one"
file = "comm/messages/codec.py"
before = "return msgspec.json.encode(message)"
after = "return msgspec.json.encode(None)"
tests = ["tests/comm/test_messages.py"]

[[mutation]]
name = "the name of a row has no epoch"
file = "comm/messages/base.py"
before = "return RowId(self.epoch, self.prompt, sample,"
after = "return RowId(0, self.prompt, sample,"
tests = ["tests/comm/test_messages.py::test_ids_read_as_epoch_prompt_sample"]
"""
"""Of these tests one finds its mutation, the other does not."""


def test_every_mutation_has_a_name_of_its_own():
    assert len({each.name for each in ALL}) == len(ALL) > 100


def test_every_mutation_changes_one_place_of_a_file_that_python_still_reads():
    for each in ALL:
        text = (ROOT / each.file).read_text()
        changed = each.applied(text)
        assert changed != text, each.name
        ast.parse(changed, filename=each.file)


def test_the_tests_that_mutations_name_exist_and_are_fast():
    assert not [(each.name, test) for each in ALL for test in each.tests if not exists(test)]
    assert all(each.tests for each in ALL)


def exists(test: str) -> bool:
    """Whether there is this file of tests, or this test in it that is not a slow one."""
    file, _, name = test.partition("::")
    if ROOT / file not in TREES:
        return False
    found = [node for node in functions(TREES[ROOT / file]) if node.name == name.partition("[")[0]]
    return not name or any("mark.slow" not in ast.unparse(node).partition("def ")[0] for node in found)


@pytest.mark.slow
def test_the_command_tells_killed_from_survived_and_leaves_the_tree_as_it_was(tmp_path: Path):
    (tmp_path / "examples.toml").write_text(EXAMPLES)
    files = [ROOT / each.file for each in mutations(tmp_path)]
    before = [path.read_text() for path in files]
    command = [sys.executable, str(ROOT / "tests/mutate.py"), "--mutations", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 of 2 mutations killed (50.0%)" in done.stdout
    assert "survived: the name of a row has no epoch (comm/messages/base.py)" in done.stdout
    assert before == [path.read_text() for path in files]
