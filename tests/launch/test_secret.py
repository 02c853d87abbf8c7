"""The run's secret: new for each start, and the condition under which a process gets the recipe."""

import os
import subprocess
import sys

import pytest

from headrace.comm.errors import SettingError
from headrace.launch.config.load import read_recipe, save_recipe
from headrace.launch.processes.fetched_recipe import fetch_recipe
from headrace.launch.processes.secret import SECRET_FILE, create_secret, read_secret

PATIENCE_S = 120.0


@pytest.fixture(autouse=True)
def no_secret_in_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HEADRACE_SECRET", raising=False)


@pytest.fixture
def store(tmp_path):
    """The store's process of a run in `tmp_path`, as its supervisor starts it; yields its address."""
    create_secret(tmp_path)
    recipe = save_recipe(read_recipe(None, [f"run.dir={tmp_path}", "run.steps=7"]))
    environment = {**os.environ, "HEADRACE_SECRET": read_secret(tmp_path).decode()}
    command = [sys.executable, "-m", "headrace.comm.store", "--recipe", str(recipe)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[1]
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def test_the_recipe_in_the_store_is_the_one_that_the_supervisor_gave_it(store, tmp_path):
    assert fetch_recipe(store, read_secret(tmp_path)).run.steps == 7


def test_a_host_with_another_secret_gets_no_recipe_and_says_what_to_do(store, tmp_path):
    with pytest.raises(SettingError, match="the secret on this host is not that of the run whose store is at"):
        fetch_recipe(store, b"another")
    create_secret(tmp_path)
    with pytest.raises(SettingError, match="share run.dir between the hosts"):
        fetch_recipe(store, read_secret(tmp_path))


def test_only_its_owner_can_read_a_secret(tmp_path):
    create_secret(tmp_path)
    first = read_secret(tmp_path)
    create_secret(tmp_path)
    assert (tmp_path / SECRET_FILE).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / SECRET_FILE).parent.stat().st_mode & 0o777 == 0o700
    assert len(first) == 64 and read_secret(tmp_path) != first


def test_a_run_folder_of_before_with_its_secret_in_the_open_gets_another_one(tmp_path):
    (tmp_path / "secret").write_text("of before")
    create_secret(tmp_path)
    assert len(read_secret(tmp_path)) == 64


def test_a_secret_of_the_environment_counts_before_that_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_SECRET", "ours")
    create_secret(tmp_path)
    assert read_secret(tmp_path) == b"ours"
    assert not (tmp_path / SECRET_FILE).exists()


def test_a_supervisor_reads_the_recipe_without_torch():
    """With it the ranks of another host would start seconds later."""
    code = "import sys, headrace.launch.processes.supervisor, headrace.launch.processes.fetched_recipe\n"
    code += "import headrace.relay.hub.shutdown\nsys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
