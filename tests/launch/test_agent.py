"""The launcher's torchrun."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.comm.process_tree import kill_tree
from headrace.launch.processes.agent import REFUSED, remove_empty_cache, send_signal


def test_a_signal_reaches_the_others_where_one_process_has_ended_already():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as alive:
        send_signal([ended.pid, alive.pid], signal.SIGKILL)
        assert alive.wait(60) == -signal.SIGKILL


def test_a_tree_of_processes_is_killed_whole_in_every_session():
    script = (
        "import subprocess, sys, time\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        " print(7, flush=True); signal.pause()'], start_new_session=True, stdout=subprocess.PIPE)\n"
        "inner.stdout.readline(); print(inner.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as outer:
        assert outer.stdout is not None
        inner = Path(f"/proc/{int(outer.stdout.readline())}/stat")
        assert kill_tree(outer.pid, 60) == []
        assert not inner.exists() or inner.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_torchs_cache_folder_goes_if_it_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("getpass.getuser", lambda: "me")
    remove_empty_cache()
    (tmp_path / "torchinductor_me").mkdir()
    remove_empty_cache()
    assert not list(tmp_path.iterdir())
    (tmp_path / "torchinductor_me" / "compiled").mkdir(parents=True)
    remove_empty_cache()
    assert (tmp_path / "torchinductor_me" / "compiled").is_dir()


@pytest.mark.parametrize(
    ("command", "is_ended"),
    [
        (["python", "FOLDER/torchrun"], True),
        (["python", "-X", "dev", "-m", "torch.distributed.run", "x"], True),
        (["python", "FOLDER/rank.py", "-k", "torchrun"], False),
        (["bash", "-c", "python FOLDER/rank.py; : torchrun"], False),
    ],
    ids=["script", "module", "word", "shell"],
)
def test_a_refused_rank_ends_a_torchrun_and_no_program_that_only_names_it(
    tmp_path: Path, command: list[str], is_ended: bool
):
    script = "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'headrace.launch.run'])\n"
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    for file in (package / "__init__.py", package / "run.py", tmp_path / "torchrun", tmp_path / "rank.py"):
        file.write_text("" if file.name == "__init__.py" else script)
    words = [word.replace("FOLDER", str(tmp_path)) for word in command]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    rank = {
        "PATH": path,
        "PYTHONPATH": str(tmp_path),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    done = subprocess.run(words, env=os.environ | rank, capture_output=True, text=True, timeout=120, check=False)
    assert "error: no recipe" in done.stderr
    assert (done.returncode == -REFUSED) is is_ended, done
