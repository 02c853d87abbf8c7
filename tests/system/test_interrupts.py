"""What Ctrl-C leaves behind."""

import signal
from pathlib import Path

import pytest
from support.job import DEADLINE_S, MakeJob, descendants_of
from support.polling import wait_for


@pytest.mark.slow
def test_after_a_second_interrupt_no_process_is_left(job: MakeJob):
    """Nothing has to end in order any more, and the terminal's next command may start the run again."""
    run = job(run__steps=10_000, rollout__engine="builtin").start()
    run.wait_for_step(1)
    assert run.process is not None
    processes = descendants_of(run.process.pid)
    assert len(processes) > 8
    run.signal(signal.SIGINT)
    run.until(lambda: "SIGINT: " in run.console.read_text())
    run.signal(signal.SIGINT)
    code, output = run.end()
    assert code == 130 and "interrupted again: the run is killed" in output, output
    assert not [pid for pid in processes if is_running(pid)]


@pytest.mark.slow
def test_a_terminal_that_closes_ends_the_run_with_a_checkpoint(job: MakeJob):
    """SIGHUP ends the launcher alone; the others follow it in order."""
    run = job(run__steps=10_000, rollout__engine="builtin").start()
    run.wait_for_step(1)
    assert run.process is not None
    processes = descendants_of(run.process.pid)
    run.signal(signal.SIGHUP)
    assert run.end()[0] == -signal.SIGHUP
    wait_for(lambda: not any(map(is_running, processes)), lambda: True, run.told, patience_s=DEADLINE_S)
    summary = run.summary()
    assert (summary["status"], summary["error"]) == ("interrupted", "ended by SIGTERM")
    assert (run.dir / "checkpoints" / f"step_{summary['steps']}" / "manifest.json").exists()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
