"""The package: both archives hold all that a run needs, and the installed command works away from the checkout."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.source_tree import ROOT, SOURCES

import headrace

PATIENCE_S = 120.0
WHEEL = f"headrace-{headrace.__version__}-py3-none-any.whl"
SDIST = f"headrace-{headrace.__version__}"


def build(source: Path, target: Path, *options: str) -> None:
    """Build both archives, or the one that is asked for, without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target), *options]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist of this checkout."""
    target = tmp_path_factory.mktemp("archives")
    build(ROOT, target)
    return target


@pytest.fixture(scope="session")
def installed(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel, whose name has a space."""
    target = tmp_path_factory.mktemp("in stalled")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--no-index", "--no-compile", "--target", str(target), str(archives / WHEEL)]
    subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=True)
    return target


def call(installed: Path, folder: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run Python with the installed package before all others, from another folder."""
    environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def files_of_the_package() -> set[str]:
    """The files that an installed package has, below `headrace/`."""
    kinds = ("*.yaml", "*.sbatch", "*.html")
    data = {path for kind in kinds for path in (ROOT / "launch").rglob(kind)}
    own = {path.name for path in (ROOT / "src" / "headrace").iterdir() if path.is_file()}
    return own | {path.relative_to(ROOT).as_posix() for path in (*SOURCES, *data)}


def test_the_wheel_holds_the_whole_package_as_real_files(archives: Path):
    with zipfile.ZipFile(archives / WHEEL) as wheel:
        names = set(wheel.namelist())
        assert not [info.filename for info in wheel.infolist() if (info.external_attr >> 16) & 0o170000 == 0o120000]
        metadata = wheel.read(f"{SDIST}.dist-info/METADATA").decode()
    assert {name.removeprefix("headrace/") for name in names if name.startswith("headrace/")} == files_of_the_package()
    assert "License-Expression: Apache-2.0\n" in metadata and f"Version: {headrace.__version__}\n" in metadata
    assert f"{SDIST}.dist-info/licenses/LICENSE" in names


def test_a_wheel_of_the_sdist_is_that_of_the_checkout(archives: Path, tmp_path: Path):
    with tarfile.open(archives / f"{SDIST}.tar.gz") as sdist:
        assert not [member.name for member in sdist if member.issym() or member.islnk()]
        sdist.extractall(tmp_path)  # our own: the filters of Python 3.11.4 and later are not needed
    build(tmp_path / SDIST, tmp_path / "built", "-t", "wheel")
    with zipfile.ZipFile(archives / WHEEL) as ours, zipfile.ZipFile(tmp_path / "built" / WHEEL) as again:
        assert sorted((info.filename, info.CRC) for info in ours.infolist()) == sorted(
            (info.filename, info.CRC) for info in again.infolist()
        )


def test_the_installed_command_tells_its_version_and_its_recipes(installed: Path, tmp_path: Path):
    where = "import headrace, sys; print(headrace.__file__, 'torch' in sys.modules, sep='\\n')"
    assert call(installed, tmp_path, "-c", where).stdout.split("\n")[:2] == [
        str(installed / "headrace" / "__init__.py"),
        "False",
    ]
    script = str(installed / "bin" / "headrace")
    assert call(installed, tmp_path, script, "--version").stdout == f"headrace {headrace.__version__}\n"
    listed = call(installed, tmp_path, script, "run", "--list").stdout
    assert "quickstart" in listed and "A small policy learns to sort digits" in listed


@pytest.mark.parametrize("words", [("run", "calculator"), ("quickstart",)], ids="-".join)
def test_an_installed_recipe_is_planned_in_any_folder(installed: Path, tmp_path: Path, words: tuple[str, ...]):
    done = call(installed, tmp_path, "-m", "headrace", *words, "--dry-run", "--settings")
    assert done.returncode == 0, done.stderr
    assert "rank 3  host 0  relay-0 + hub" in done.stdout
    assert str(installed / "headrace" / "launch" / "recipes") in done.stdout, "the reward is the package's own"
    assert [*tmp_path.iterdir()] == []
