"""The documents name files, modules and settings that exist, and their links lead somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.source_tree import FLOORS, MODULES, ROOT, SOURCES

from headrace.launch.command import COMMANDS
from headrace.launch.config.load import LAB, known_settings, sections
from headrace.launch.lab.settings import lab_fields

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = [page for page in PAGES if page.name not in ("log.md", "CHANGELOG.md")]
"""Pages that speak of the present. The others may name what has been removed."""
FILE = re.compile(rf"\b(?:{'|'.join((*FLOORS, 'tests', 'docs'))})/[\w/]+\.(?:py|sh|yaml|json|md)\b")
MODULE = re.compile(r"python -m headrace\.([a-z_.]+)")
COMMAND = re.compile(r"(?:^|`|\.venv/bin/)headrace ([a-z]+)\b", re.MULTILINE)
SETTING = re.compile(rf"\b((?:{'|'.join(name for name in (*dict(sections()), LAB))})\.\w+)=")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
NAMED_PAGE = re.compile(r"\b(docs/[\w/]+\.md)(?:#([\w-]+))?")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def named(pattern: re.Pattern[str]) -> Iterator[tuple[Path, str]]:
    """(document, name) for each match of a pattern."""
    return ((path, match) for path in DOCUMENTS for match in pattern.findall(path.read_text()))


def anchors(page: Path) -> set[str]:
    """The names by which GitHub links to a page's headings."""
    headings = HEADING.findall(CODE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_file_that_the_documents_name_exists():
    assert not [(path.name, file) for path, file in named(FILE) if not (ROOT / file).is_file()]


def test_every_page_and_heading_that_the_program_names_exists():
    found = {match for path in SOURCES for match in NAMED_PAGE.findall(path.read_text())}
    assert len([heading for _, heading in found if heading]) >= 6
    assert not [page for page, _ in found if not (ROOT / page).is_file()]
    assert not [(page, heading) for page, heading in found if heading and heading not in anchors(ROOT / page)]


def test_every_module_that_the_documents_run_exists():
    assert not [(path.name, module) for path, module in named(MODULE) if module.rstrip(".") not in MODULES]


def test_every_command_that_the_documents_run_exists():
    assert {name for _, name in named(COMMAND)} == {*COMMANDS}


def test_every_setting_that_the_documents_set_exists():
    known = {*known_settings(), *(f"{LAB}.{name}" for name in lab_fields())}
    assert not [(path.name, setting) for path, setting in named(SETTING) if setting not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_and_a_heading(page: Path):
    for target, heading in LINK.findall(CODE.sub("", page.read_text())):
        file = (page.parent / target).resolve() if target else page
        assert file.is_file(), target
        assert not heading or heading in anchors(file), f"{target}#{heading}"
