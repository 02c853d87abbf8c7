"""The documents name files, modules and settings that exist."""

import re
from collections.abc import Iterator
from pathlib import Path

from support.source_tree import FLOORS, MODULES, ROOT

from headrace.launch.config.load import LAB, known_settings, sections
from headrace.launch.lab.settings import lab_fields

DOCUMENTS = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md")]
FILE = re.compile(rf"\b(?:{'|'.join((*FLOORS, 'tests', 'docs'))})/[\w/]+\.(?:py|sh|yaml|json|md)\b")
MODULE = re.compile(r"python -m headrace\.([a-z_.]+)")


SETTING = re.compile(rf"\b((?:{'|'.join(name for name in (*dict(sections()), LAB))})\.\w+)=")


def named(pattern: re.Pattern[str]) -> Iterator[tuple[Path, str]]:
    """(document, name) for each match of a pattern."""
    return ((path, match) for path in DOCUMENTS for match in pattern.findall(path.read_text()))


def test_every_file_that_the_documents_name_exists():
    assert not [(path.name, file) for path, file in named(FILE) if not (ROOT / file).is_file()]


def test_every_module_that_the_documents_run_exists():
    assert not [(path.name, module) for path, module in named(MODULE) if module.rstrip(".") not in MODULES]


def test_every_setting_that_the_documents_set_exists():
    known = {*known_settings(), *(f"{LAB}.{name}" for name in lab_fields())}
    assert not [(path.name, setting) for path, setting in named(SETTING) if setting not in known]
