import subprocess
import sys

import numpy as np
from timed_link import Clock, TimedLink

from headrace.comm.timed_link import Clock, TimedLink
from headrace.launch.bench.harness import Row, best_seconds, line, read_json, run, write_json
from headrace.launch.bench.relay_cluster import Hosts

ROWS = [Row("tcp-link", "raw socket", 4.0, "GB/s", 0.95), Row("actor-stall-6-relays", "1 relay", 3.0, "ms", 1.02)]


def test_rows_survive_their_file(tmp_path):
    write_json(ROWS, tmp_path / "rows.json")
    assert read_json(tmp_path / "rows.json") == ROWS


def test_a_line_shows_value_unit_ratio_and_peer():
    assert all(word in line(ROWS[0]) for word in ("tcp-link", "4.000 GB/s", "0.950", "raw socket"))


def test_workloads_are_run_by_name_and_shown_as_they_come(capsys):
    workloads = {row.workload: lambda num_bytes, row=row: [row] * num_bytes for row in ROWS}
    assert run(workloads, ["actor-stall-6-relays"], 2) == [ROWS[1]] * 2
    assert capsys.readouterr().out.count("1 relay") == 2


def test_the_best_of_several_timings_counts_and_works_take_turns():
    calls, clock, seconds = [], Clock(), iter([5.0, 2.0, 1.0, 4.0, 3.0, 8.0])

    def work(name):
        calls.append(name)
        clock.now += next(seconds)

    assert best_seconds(lambda: work("a"), lambda: work("b"), repeats=3, now=lambda: clock.now) == [1.0, 2.0]
    assert calls == ["a", "b"] * 3


def test_the_benchmark_of_links_writes_its_rows(tmp_path):
    path = tmp_path / "rows.json"
    command = ["-m", "headrace.launch.bench.links", "--only", "tcp-link", "--megabytes", "4", "--json", str(path)]
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, timeout=60)
    (row,) = read_json(path)
    assert row.workload == "tcp-link" and row.ratio > 0


def test_the_emulated_cluster_pushes_down_its_chain():
    with Hosts(2, 1 << 20, pace=20e6) as hosts:
        assert hosts.push() > 0
        assert hosts.push() > 0.04


def test_a_timed_link_carries_one_piece_after_the_other():

    near, far = Clock(1.0), Clock()
    link = TimedLink(near, far, start_s=0.5, byte_s=0.1)
    for value in (3, 4):
        link.send(np.full(10, value, np.uint8))
    piece = np.zeros(10, np.uint8)
    link.receive(piece)
    assert piece[0] == 3 and far.now == 2.5
    link.receive(piece)
    assert piece[0] == 4 and far.now == 4.0 and near.now == 1.0
