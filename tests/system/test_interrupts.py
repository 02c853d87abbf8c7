"""What Ctrl-C leaves behind."""

import signal
from pathlib import Path

import pytest
from support.job import MakeJob, descendants_of


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


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
