"""The commands may be called from a program or a notebook: they leave its environment and its signals as they are."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.job import MakeJob
from support.slurm import free_ports
from support.source_tree import ROOT

from headrace.comm.environment import ADDRESS_FILE
from headrace.comm.process_tree import children_of
from headrace.launch import audit, run
from headrace.launch.config.run_folder import CONFIG_FILE
from headrace.launch.lab import command as plan
from headrace.launch.processes.secret import SECRET_FILE
from headrace.launch.report import replay
from headrace.launch.status import command as ctl

EMULATED = ROOT / "tests" / "bench" / "schedules" / "recipes" / "emulated-16.yaml"


def environment() -> dict[str, str]:
    """This process's variables, without one that torch sets when parts of it are imported."""
    return {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}


@pytest.mark.parametrize(
    ("command", "words", "code"),
    [
        (ctl.main, ["RUN", "status"], 1),
        (ctl.main, ["RUN", "stop"], 1),
        (run.main, ["join=RUN", "roles.rollout=1"], 2),
        (run.main, ["run.dir=RUN", "roles.rollout=0"], 2),
        (replay.main, ["RUN"], 2),
        (run.main, [str(EMULATED), "--dry-run", "--gpus=8x80"], 0),
        (plan.main, [str(EMULATED), "--runs=0"], 2),
        (audit.main, ["RUN"], 2),
        (run.quickstart, ["run.stpes=3"], 2),
        (run.quickstart, ["--dry-run"], 0),
    ],
    ids=["status", "stop", "join", "refused", "replay", "dry-run", "plan", "audit", "mistake", "quickstart"],
)
def test_a_command_leaves_the_environment_of_its_caller_alone(
    tmp_path: Path, command: Callable[[list[str]], int], words: list[str], code: int, monkeypatch: pytest.MonkeyPatch
):
    """The folder is that of a run which has ended: its address is there, and no store answers."""
    for name in ("HEADRACE_STORE", "HEADRACE_SECRET", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / CONFIG_FILE).touch()
    (tmp_path / ADDRESS_FILE).write_text(f"127.0.0.1:{free_ports(1)[0]}")
    (tmp_path / SECRET_FILE).parent.mkdir()
    (tmp_path / SECRET_FILE).write_text("a secret")
    before = environment()
    assert command([word.replace("RUN", str(tmp_path)) for word in words]) == code
    assert environment() == before


def test_a_launcher_leaves_the_signals_of_its_caller_alone(tmp_path: Path):
    """After a run Ctrl-C interrupts the caller again, and a signal that came too late ends nothing. torchrun is a script here."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text("#!/bin/sh\nkill -TERM $PPID\nkill -USR1 $PPID\n")
    torchrun.chmod(0o755)
    caller = (
        "import signal, sys\n"
        "from headrace.launch.config.load import read_recipe\n"
        "from headrace.launch.processes.agent import Hosts, Torchrun\n"
        "sys.executable = sys.argv[1]\n"
        "Torchrun(read_recipe(None, [f'run.dir={sys.argv[2]}']), Hosts()).run()\n"
        "assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    sys.exit(7)\n"
    )
    command = [sys.executable, "-c", caller, str(torchrun), str(tmp_path / "run")]
    assert subprocess.run(command, timeout=120, check=False).returncode == 7


def test_a_refused_start_leaves_no_folder(tmp_path: Path):
    """Not that of a launcher on several hosts either, whose first rank refuses."""
    folder = tmp_path / "runs" / "new"
    assert run.main([f"run.dir={folder}", "model.path=nowhere"]) == 2
    assert not folder.exists()
    port = free_ports(1)[0]
    hosts = ["--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={port}"]
    assert run.main([f"run.dir={folder}", "roles.rollout=2", "model.path=nowhere", *hosts]) == 2
    assert not folder.exists()


def test_a_port_of_the_first_host_that_is_in_use_is_named_before_the_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    folder = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        hosts = ["--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={port}"]
        assert run.main([f"run.dir={folder}", "roles.rollout=3", "model.path=nowhere", *hosts]) == 2
    assert f"error: --master-port={port}: Address already in use" in capfd.readouterr().err
    assert not folder.exists()


def test_an_interrupt_before_torchrun_has_started_a_rank_prints_no_traceback(job: MakeJob):
    early = job().start()
    assert early.process is not None
    pid = early.process.pid
    early.until(lambda: bool(children_of(pid)), interval_s=0.001)
    early.signal(signal.SIGINT)
    code, output = early.end()
    assert code == 130 and "Traceback" not in output, output
