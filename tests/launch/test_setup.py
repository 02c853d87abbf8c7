"""Setting up: `launch/setup.sh`, the pins, the packages, the commands of CI."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that set-up reads, and a stand-in for .venv's Python that records its arguments."""
    for name in ("pyproject.toml", "constraints.txt", "launch/setup.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/calls"\n')
    python.chmod(0o755)
    return tmp_path


def set_up(checkout: Path, *extras: str, **environment: str) -> list[str]:
    """The arguments that .venv's Python received."""
    (checkout / "calls").unlink(missing_ok=True)
    subprocess.run(
        ["bash", checkout / "launch/setup.sh", *extras],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
    )
    return (checkout / "calls").read_text().splitlines() if (checkout / "calls").exists() else []


def test_set_up_installs_pinned_torch_first_and_then_the_project(checkout: Path):
    torch, project = set_up(checkout, "test")
    assert torch.endswith("install --quiet --constraint constraints.txt torch")
    assert project.endswith("install --quiet --constraint constraints.txt --editable .[test]")


def test_set_up_does_nothing_when_it_is_current(checkout: Path):
    assert set_up(checkout, "test")
    assert set_up(checkout, "test") == []
    assert set_up(checkout) == []


def test_set_up_installs_again_for_other_extras_or_another_pin(checkout: Path):
    set_up(checkout)
    assert set_up(checkout, "test")
    (checkout / "constraints.txt").write_text("torch==2.13.0\n")
    assert set_up(checkout, "test")


def test_set_up_without_a_python_names_the_variable_to_set(checkout: Path):
    shutil.rmtree(checkout / ".venv")
    done = subprocess.run(
        ["bash", checkout / "launch/setup.sh"],
        check=False,
        env={**os.environ, "PYTHON": "no-such-python"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "setup: no Python 3.11 or newer found; set PYTHON to one\n")


def test_every_direct_dependency_is_pinned_within_its_bounds():
    groups = [PYPROJECT["project"]["dependencies"], PYPROJECT["project"]["optional-dependencies"]["test"]]
    pins = {name.lower(): version for name, version in PINS.items()}
    for requirement in map(Requirement, [*groups[0], *groups[1]]):
        assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement


@pytest.mark.parametrize(
    "name", ["launch/setup.sh", "launch/quickstart.sh", "tests/run.sh", ".ci/run", ".ci/nightly", "constraints.txt"]
)
def test_commands_name_no_package_registry(name: str):
    text = (ROOT / name).read_text()
    assert not re.search(r"https?://|index-url|pypi", text)
    assert name == "constraints.txt" or subprocess.run(["bash", "-n", ROOT / name], check=True).returncode == 0


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_ci_tests_what_is_committed_at_another_place_and_leaves_no_copy(tmp_path: Path):
    clone, told = tmp_path / "clone", tmp_path / "told"
    for name, text in {
        ".ci/run": (ROOT / ".ci/run").read_text(),
        "tests/run.sh": f'printf "%s\\n" "$0" "$@" > "{told}"\ncd "$(dirname "$0")/.."; ls *.txt; exit 7\n',
        "kept.txt": "",
    }.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text)
    git = ["git", "-C", clone, "-c", "user.name=x", "-c", "user.email=x@y"]
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "x"]):
        subprocess.run([*git, *words], check=True)
    (clone / "forgotten.txt").write_text("")
    done = subprocess.run(["bash", clone / ".ci/run", "-m", "a b"], capture_output=True, text=True, check=False)
    script, *arguments = told.read_text().splitlines()
    assert done.returncode == 7 and arguments[:2] == ["-m", "a b"]
    copy = Path(script).parents[1]
    assert str(copy).startswith("/tmp/") and " " in copy.name and not copy.exists()
    assert done.stdout == "kept.txt\n", "what is not committed is not tested"


@pytest.mark.parametrize("script", ["launch/setup.sh", "launch/quickstart.sh", "tests/run.sh"])
def test_a_script_says_that_it_needs_linux(tmp_path: Path, script: str):
    (tmp_path / "uname").write_text("#!/bin/sh\necho Darwin\n")
    (tmp_path / "uname").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", ROOT / script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "Headrace needs Linux: this is Darwin\n")


@pytest.mark.parametrize("module", ["run", "quickstart", "ctl"])
def test_a_command_says_that_it_needs_linux(module: str):
    code = f"import sys, runpy; sys.platform = 'darwin'; runpy.run_module('headrace.launch.{module}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "Headrace needs Linux: this is darwin\n")
