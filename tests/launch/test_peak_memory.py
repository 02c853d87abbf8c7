"""A run keeps what was planned for each process beside the most that it held."""

import json

from headrace.comm.host_memory import HeldMemory
from headrace.launch.processes.memory_kill import MemoryKills
from headrace.launch.report.peak_memory import main, memory_row, merge_peaks, write_peaks, write_planned


def test_planned_and_peak_of_all_supervisors_are_in_one_file(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    write_planned(tmp_path, {"actor-0": 5e9, "rollout-0": 1e9})
    write_peaks(tmp_path, "actor-0", {"actor-0": 4_000_000_000, "store": 150_000_000})
    write_peaks(tmp_path, "rollout-0", {"rollout-0": 900_000_000})
    found = merge_peaks(tmp_path)
    assert found == merge_peaks(tmp_path) == json.loads((tmp_path / "memory.json").read_text())
    assert found["actor-0"] == {"planned": 5e9, "peak": 4e9} and found["store"] == {"peak": 150_000_000}
    assert memory_row(found) == "actor-0 4.00 GB (5.00 planned), rollout-0 0.90 GB (1.00 planned)"
    assert main([str(tmp_path)]) == 0 and "1.25" in capsys.readouterr().out
    assert main([]) == 2


def test_a_supervisor_keeps_the_peak_of_a_child_that_is_started_again(tmp_path, monkeypatch):
    kills, held = MemoryKills({}), iter((700, 900, 200))
    monkeypatch.setattr("headrace.launch.processes.memory_kill.LOOK_S", 0)

    def held_by(pid):
        size = next(held)
        return HeldMemory(size, size, size)

    monkeypatch.setattr("headrace.launch.processes.memory_kill.held_by", held_by)
    for pid in (1, 1, 2):
        kills.look({"actor-0": pid})
    assert kills.peaks == {"actor-0": 900}


def test_shared_memory_that_a_process_unmaps_at_its_end_is_not_its_own_peak(monkeypatch):
    kills = MemoryKills({})
    monkeypatch.setattr("headrace.launch.processes.memory_kill.LOOK_S", 0)
    looks = iter([HeldMemory(1800, 1000, 1800), HeldMemory(1900, 1100, 2000), HeldMemory(1000, 1000, 2000)])
    monkeypatch.setattr("headrace.launch.processes.memory_kill.held_by", lambda pid: next(looks))
    for _ in range(3):
        kills.look({"rollout-0": 1})
    assert kills.peaks == {"rollout-0": 1200}, "2,000 at most, of which 800 were shared"


def test_a_run_whose_folder_is_gone_leaves_nothing(tmp_path):
    write_peaks(tmp_path / "gone", "actor-0", {"actor-0": 1})
    assert not (tmp_path / "gone").exists()
