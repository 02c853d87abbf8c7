"""The benchmarks: the list, the table, the file of rows; no row is lost under load."""

import json
import os
import subprocess
import sys
from pathlib import Path

import bench.members
import msgspec
import pytest
from bench.__main__ import CATALOGUE, choose, main
from bench.harness import ENVIRONMENT, BenchProcess, Measurement, Options, best_seconds, command, line, medians
from bench.learning import Outcome, outcome_of, rows_of
from bench.policies import policy_folder
from bench.relay_cluster import RelayCluster
from bench.storage_load import load
from bench.trainer import write_rollouts
from support.policies import tiny_policy
from support.source_tree import ROOT


def read_rows(path: Path) -> list[Measurement]:
    return msgspec.json.decode(path.read_bytes(), type=list[Measurement])


def test_the_list_has_a_line_for_each_workload_and_loads_no_torch():
    code = "import sys; from bench.__main__ import main; main(['--list']); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}
    )
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines] == [workload.name for workload in CATALOGUE]
    assert all(workload.measures in line for workload, line in zip(CATALOGUE, lines, strict=True))


@pytest.mark.parametrize("workload", CATALOGUE, ids=lambda workload: workload.name)
def test_each_workload_of_the_list_can_be_loaded(workload):
    assert callable(workload.load())


def test_a_workload_is_found_by_its_name_its_group_and_its_rows():
    assert (
        [w.name for w in choose(["shm-pull"])] == [w.name for w in choose(["shm-copies", "digest"])] == ["shm-copies"]
    )
    assert [w.name for w in choose(["hub", "put"])] == [
        "units",
        "hub-events",
        "hub-events-4096-groups",
        "journal-replay",
    ]
    assert choose([]) == list(CATALOGUE)


def test_an_unknown_workload_is_refused_with_the_names_near_it(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as refused:
        main(["shm-pul"])
    assert refused.value.code == 2
    assert "'shm-pul'" in (told := capsys.readouterr().err) and "shm-pull" in told and "tcp-link" not in told


def test_several_runs_become_one_row_of_medians_with_their_span():
    runs = [[Measurement("put", "peer", value, "ms", value / 2)] for value in (4.0, 9.0, 5.0)]
    assert medians(runs) == [Measurement("put", "peer", 5.0, "ms", 2.5, ((4.0, 2.0), (9.0, 4.5), (5.0, 2.5)))]
    shown = line(medians(runs)[0])
    assert all(word in shown for word in ("put", "5.000", "4.000..9.000 ms", "2.500", "2.000..4.500", "peer"))


@pytest.mark.slow
def test_our_side_of_the_trainer_bench_trains_on_the_written_rollouts(tmp_path):
    policy_folder(tmp_path, str(tiny_policy(tmp_path, "llama")))
    assert write_rollouts(tmp_path) > 64
    with BenchProcess(command("trainer", tmp_path)) as ours:
        ours.line("ready")
        assert all(seconds > 0 and memory > 0 for seconds, memory in (json.loads(ours.ask("[")) for _ in range(2)))


def test_functions_take_turns_and_the_best_time_of_each_counts():
    calls, ticks = [], iter([0, 3, 10, 12, 20, 21, 30, 35])
    best = best_seconds(lambda: calls.append("a"), lambda: calls.append("b"), repeats=2, clock=lambda: next(ticks))
    assert (best, calls) == ([1, 2], ["a", "b"] * 2)


def test_the_error_names_a_process_that_ends_before_its_answer():
    with (
        BenchProcess([sys.executable, "-c", "print('noise', flush=True)"]) as child,
        pytest.raises(RuntimeError, match="noise"),
    ):
        child.line("ready")


@pytest.mark.slow
def test_the_command_runs_a_workload_several_times_and_writes_its_rows(tmp_path: Path):
    path = tmp_path / "new" / "rows.json"
    words = ["tcp-link", "--megabytes", "4", "--runs", "2", "--json", str(path)]
    command = [sys.executable, str(ROOT / "tests" / "bench"), *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    (row,) = read_rows(path)
    assert (row.name, row.peer, row.unit, len(row.runs)) == ("tcp-link", "raw socket", "GB/s", 2)
    assert min(row.runs) <= (row.value, row.ratio) and "tcp-link" in done.stdout.splitlines()[1]


def test_a_workload_without_its_peer_is_left_out_while_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["units", "journal-replay", "--events", "3000", "--json", str(tmp_path / "rows.json")]) == 0
    rows = read_rows(tmp_path / "rows.json")
    assert {row.name: row.unit for row in rows} == {
        "journal-replay": "1/s",
        "journal-audit": "1/s",
        "journal-recovery": "s",
        "journal-snapshot": "s",
    }
    assert "units is left out" in capsys.readouterr().err


def test_the_emulated_cluster_pushes_one_version_after_another_down_its_chain():
    with RelayCluster(2, 1 << 20) as cluster:
        assert cluster.push() > 0
        assert cluster.push() > 0
        assert cluster.version == 2


@pytest.mark.slow
def test_many_writers_and_readers_lose_nothing():
    rows = {row.name: row for row in load("load", Options(seconds=8))}
    assert rows["load-rows"].value > 0 and rows["load-rows"].ratio == 1
    assert rows["load-memory"].ratio < 1.5


def test_deaths_of_members_are_known_and_no_other_member_counts_as_dead(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench.members, "_SETTLE_S", 1.5)
    options = Options(hosts=5, members=3, kill=6, seconds=1.0, expiry_s=2.0)
    rows = {row.name: row for row in bench.members.members("members", options)}
    assert rows["members-crash"].holds and "6 killed, others dead: 0" in rows["members-crash"].peer
    assert rows["members-freeze"].value > 1.0
    assert all(rows[f"members-{name}"].value > 0 for name in ("join", "memory", "close", "kill", "crash"))


def test_a_target_is_reached_where_the_mean_of_three_steps_is_there():
    rewards = [0.0, 5.0, 5.0, 4.0, 6.0, 6.0]
    rows = [{"reward/mean": r, "time_s": 10.0 + 2 * k, "staleness/mean": k} for k, r in enumerate(rewards)]
    assert outcome_of(rows, target=5.0) == Outcome(steps=5, seconds=8.0, staleness=2.5, reward=16 / 3)
    assert outcome_of(rows, target=7.0).steps == len(rewards)


def test_a_comparison_has_the_median_over_the_seeds_with_each_seed():
    ours, theirs = ([Outcome(n, n / 2, 1.0, 6.0) for n in steps] for steps in ((9, 12, 10), (8, 8, 10)))
    steps, *_ = rows_of("headrace", ours, "sync", theirs)
    assert (steps.name, steps.value, steps.ratio) == ("headrace-steps", 10, 1.125)
    assert medians([[steps]]) == [steps]
