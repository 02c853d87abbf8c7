"""Hosts that join a running job, and orders to a running job."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.closing import at_end
from support.job import DEADLINE_S, Job, MakeJob, assert_account_adds_up, descendants_of

from headrace.launch.run import main as launch
from headrace.launch.status import command as ctl


class Joined:
    """The launcher of a host that has joined; its environment does not know the run."""

    def __init__(self, job: Job, *words: str) -> None:
        self.output = job.folder / f"joined{len(list(job.folder.glob('joined*')))}"
        command = [sys.executable, "-m", "headrace.launch.run", f"join={job.dir}", *words]
        with self.output.open("w") as stream:
            self.process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        at_end(self.kill)

    def kill(self) -> None:
        """SIGKILL to the launcher and everything that it has started."""
        for pid in [self.process.pid, *descendants_of(self.process.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(DEADLINE_S)

    def end(self) -> int:
        return self.process.wait(DEADLINE_S)


def has_leased(job: Job, *rollouts: str) -> bool:
    journal = (job.dir / "journal.jsonl").read_bytes()
    return all(f'"holder":"{rollout}"'.encode() in journal for rollout in rollouts)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch):
    for name in ("HEADRACE_STORE", "HEADRACE_SECRET"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.slow
def test_a_rollout_joins_works_is_drained_and_the_run_is_stopped(job: MakeJob, tmp_path: Path, capsys):
    run = job(run__steps=100_000).start()
    run.wait_for_step(1)
    joined = Joined(run, "roles.rollout=2", "roles.relay=1")
    run.until(lambda: has_leased(run, "rollout-2", "rollout-3"))
    assert launch([f"join={tmp_path}"]) == 2
    assert f"no run has started in {tmp_path}" in capsys.readouterr().err
    assert launch(["join=127.0.0.1:1"]) == 2
    assert "127.0.0.1:1 is not the folder of a run; an address needs HEADRACE_SECRET too" in capsys.readouterr().err
    assert ctl.main([str(run.dir), "status"]) == 0
    status = capsys.readouterr().out
    assert re.search(r"^\d+ of \d+ steps ", status) and "holds True" in status
    assert [name for name in ("rollout-0", "rollout-3", "relay-1", "hub") if f"\n{name} " not in status] == []
    assert ctl.main([str(run.dir), "drain", "rollout-2"]) == 0
    run.until(lambda: "rollout-2 " not in told(run, capsys))
    joined.process.send_signal(signal.SIGTERM)  # drains rollout-3, and ends the relay
    assert joined.end() == 128 + signal.SIGTERM, joined.output.read_text() + run.logs()
    assert ctl.main([str(run.dir), "drain", "rollout-2"]) == 2
    assert "drain rollout-2: no such rollout; there are rollout-0, rollout-1" in capsys.readouterr().err
    assert ctl.main([str(run.dir), "stop"]) == 0
    code, output = run.end()
    assert code == 128 + signal.SIGTERM and "Traceback" not in output + joined.output.read_text()
    assert_account_adds_up(run)
    assert (run.dir / "checkpoints" / "latest").exists()


def told(job: Job, capsys: pytest.CaptureFixture[str]) -> str:
    assert ctl.main([str(job.dir), "status"]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_death_of_a_host_that_joined_costs_its_unfinished_trajectories_alone(job: MakeJob):
    run = job(run__steps=100_000).start()
    run.wait_for_step(1)
    joined = Joined(run, "roles.rollout=1")
    run.until(lambda: has_leased(run, "rollout-2"))
    joined.kill()
    run.wait_for_step(len(run.metrics()) + 10)
    assert ctl.main([str(run.dir), "stop"]) == 0
    code, output = run.end()
    assert code == 128 + signal.SIGTERM and "Traceback" not in output, output + run.logs()
    assert assert_account_adds_up(run)["failed"] == 0
