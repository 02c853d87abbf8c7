"""A process waits at a failpoint until the bench has acted; without a bench it passes."""

import os
import select
import subprocess
import sys

from bench.faults.failpoints import held_at
from bench.faults.processes import find, processes_of

from headrace.comm.trace import FAILPOINTS, failpoint

WORKER = """
import os, sys, time
from headrace.comm.trace import failpoint
while not os.path.exists(os.environ["HEADRACE_FAILPOINTS"]):
    time.sleep(0.01)
failpoint("pull")
failpoint("push", version=7)
print("passed", flush=True)
time.sleep(600)
"""


def test_a_process_waits_at_the_wanted_point_and_passes_the_others(tmp_path):
    address = tmp_path / "points"
    command = [sys.executable, "-c", WORKER]
    worker = subprocess.Popen(command, env={**os.environ, FAILPOINTS: str(address)}, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    try:
        with held_at(address, lambda hit: hit.point == "push", 60) as hit:
            assert hit is not None
            assert (hit.point, hit.pid, hit.facts) == ("push", worker.pid, {"version": 7})
            assert not select.select([worker.stdout], [], [], 0.1)[0], "it has passed the point"
        assert worker.stdout.readline() == "passed\n"
        assert list(processes_of(address)) == find(address, "helper") == [worker.pid]
    finally:
        worker.kill()
        worker.communicate(timeout=60)
    assert not processes_of(address)


def test_without_a_hit_there_is_none_and_nothing_listens_any_more(tmp_path):
    address = tmp_path / "points"
    with held_at(address, lambda hit: True, 0.01) as hit:
        assert hit is None
        assert not address.exists()


def test_without_a_bench_a_failpoint_is_passed_at_once(monkeypatch, tmp_path):
    failpoint("push")
    monkeypatch.setenv(FAILPOINTS, str(tmp_path / "points"))
    failpoint("push", version=1)
