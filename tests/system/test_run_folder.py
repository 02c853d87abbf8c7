"""One run folder has one run: a second launcher is refused, and a folder that is moved away ends the run."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.job import DEADLINE_S, MakeJob

from headrace.comm.errors import SettingError
from headrace.launch.config.run_folder import FolderWatch, lock_run_folder
from headrace.launch.processes.secret import SECRET_FILE


@pytest.mark.slow
def test_a_second_launcher_is_refused_and_a_folder_that_is_renamed_ends_the_run(job: MakeJob):
    run = job(run__steps=10_000).start()
    run.until(lambda: (run.dir / SECRET_FILE).exists())
    before = {name: (run.dir / name).read_bytes() for name in (SECRET_FILE, "config.yaml")}
    words = [f"{key}={value}" for key, value in (run.settings | {"run.seed": 7}).items()]
    command = [sys.executable, "-m", "headrace.launch.run", *words]
    second = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert second.returncode == 2, second.stderr
    assert second.stderr.startswith(f"headrace: error: run.dir: a run is under way in {run.dir}; end it")
    assert second.stderr.count("\n") == 1
    assert {name: (run.dir / name).read_bytes() for name in before} == before
    run.wait_for_step(2)
    moved = run.dir.rename(run.dir.with_name("moved"))
    code, output = run.end()
    assert code == 2, output
    assert f"error: run.dir: {run.dir} was renamed or removed while its run was under way" in output
    assert "Traceback" not in output and not run.dir.exists()
    assert (moved / "journal.jsonl").stat().st_size > 0


def test_the_lock_of_a_run_folder_ends_with_the_process_that_has_it(tmp_path: Path):
    script = (
        "import sys, time; from pathlib import Path; from headrace.launch.config.run_folder import lock_run_folder\n"
        "lock = lock_run_folder(Path(sys.argv[1])); print('locked', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        with pytest.raises(SettingError, match=r"run\.dir: a run is under way"):
            lock_run_folder(tmp_path)
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)
        lock_run_folder(tmp_path).close()


def test_a_folder_that_was_made_again_is_not_the_one_before(tmp_path: Path):
    """The number of a removed folder may be given to the next one."""
    folder = tmp_path / "run"
    folder.mkdir()
    watch = FolderWatch(folder)
    assert watch.problem() == ""
    shutil.rmtree(folder)
    assert "was renamed or removed" in watch.problem()
    folder.mkdir()
    assert "was renamed or removed" in watch.problem()
