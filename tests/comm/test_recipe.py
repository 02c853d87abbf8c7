"""Every setting has a test that sees its effect, named in `tests/assets/settings.toml`."""

import ast
import tomllib

import msgspec
import pytest
from support.source_tree import ROOT

from headrace.comm.recipe import Recipe
from headrace.launch.config.load import known_settings, read_recipe, sections

MOST = 128
"""Settings that a user has to read about; one more takes the place of another one. The 126th, `run.samples`, took none: it shows what the
policy writes, which no other setting does, and none of the others earns less than it. Nor did the 127th, `run.report_to`: a team that keeps
its runs in a tracker cannot do so from the command line without it. Nor did the 128th, `rollout.serve`: agents of any framework talk to the
policy while it trains, which no other setting lets them."""
TESTS: dict[str, dict[str, str]] = tomllib.loads((ROOT / "tests/assets/settings.toml").read_text())


def test_each_setting_has_a_test_that_sees_its_effect():
    assert [f"{section}.{name}" for section, tests in TESTS.items() for name in tests] == list(known_settings())
    assert len(known_settings()) <= MOST
    named = {test for tests in TESTS.values() for test in tests.values()}
    files = {test.partition("::")[0] for test in named}
    found = {
        f"{file}::{node.name}"
        for file in files
        for node in ast.parse((ROOT / file).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert not named - found


def test_the_defaults_are_within_their_own_bounds():
    assert msgspec.convert(msgspec.to_builtins(Recipe()), Recipe) == Recipe() == read_recipe(None)


@pytest.mark.parametrize("section", dict(sections()))
def test_a_section_cannot_be_changed_after_it_is_read(section: str):
    settings = getattr(read_recipe(None), section)
    for field in msgspec.structs.fields(settings):
        with pytest.raises(AttributeError):
            setattr(settings, field.name, field.default)
