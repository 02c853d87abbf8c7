"""How many threads each process of a host gets."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.assets import ASSETS

from headrace.comm.environment import OVERLAP_CORES
from headrace.launch import cores as cores_module
from headrace.launch.config.load import read_recipe
from headrace.launch.cores import (
    Cores,
    cores_of,
    cpu_quotas,
    ignored_threads,
    is_small,
    num_cores,
    usable_cores,
)
from headrace.launch.run import main

STORIES = ASSETS / "stories260k"
DEFAULT = ["actor", "rollout", "relay"]
"""The roles of the default layout's ranks."""
ROLES = ("actor", "rollout", "shard", "reference", "relay", "task", "hub")


def threads(number: int, ranks: dict[str, int], **facts) -> dict[str, int]:
    cores = Cores(number, ranks, **facts)
    return {role: cores.threads(role) for role in ranks}


@pytest.mark.parametrize(
    ("number", "ranks", "expected"),
    [
        (1, {"actor": 1, "rollout": 1}, {"actor": 1, "rollout": 1}),
        (2, {"actor": 1, "rollout": 1}, {"actor": 2, "rollout": 1}),
        (2, {"actor": 2, "rollout": 1}, {"actor": 1, "rollout": 1}),
        (2, {"actor": 1, "rollout": 2}, {"actor": 2, "rollout": 1}),
        (4, {"actor": 1, "rollout": 1}, {"actor": 3, "rollout": 1}),
        (16, {"actor": 1, "rollout": 1}, {"actor": 12, "rollout": 4}),
        (16, {"actor": 2, "rollout": 2}, {"actor": 6, "rollout": 2}),
        (16, {"actor": 1, "rollout": 1, "reference": 1}, {"actor": 12, "rollout": 2, "reference": 2}),
        (16, {"actor": 1, "rollout": 1, "shard": 1}, {"actor": 12, "rollout": 2, "shard": 2}),
        (16, {"actor": 1, "rollout": 64}, {"actor": 8, "rollout": 1}),
        (16, {"rollout": 2}, {"rollout": 8}),
        (16, {"actor": 4}, {"actor": 4}),
    ],
)
def test_trainer_and_rollouts_that_work_at_the_same_time_share_the_cores(number, ranks, expected):
    """On three cores and fewer the trainer has all of them: it works longest."""
    assert threads(number, ranks) == expected


@pytest.mark.parametrize(("number", "expected"), [(1, 1), (2, 2), (16, 16)])
def test_roles_that_take_turns_have_all_cores_each(number, expected):
    assert threads(number, {"actor": 1, "rollout": 1}, takes_turns=True) == {"actor": expected, "rollout": expected}
    halves = max(1, number // 2)
    assert threads(number, {"actor": 2, "rollout": 2}, takes_turns=True) == {"actor": halves, "rollout": halves}


@given(
    st.integers(1, 256),
    st.dictionaries(st.sampled_from(ROLES[:4]), st.integers(1, 40), min_size=1),
    st.booleans(),
    st.booleans(),
)
def test_no_role_has_more_threads_than_cores_and_together_few_are_left_over(number, ranks, takes_turns, has_gpus):
    cores = Cores(number, ranks, takes_turns=takes_turns, has_gpus=has_gpus)
    for role, count in ranks.items():
        assert 1 <= cores.threads(role) <= number
        assert count == 1 or cores.threads(role) * count <= max(number, count)
    total = sum(count * cores.threads(role) for role, count in ranks.items())
    if not takes_turns and number > OVERLAP_CORES:
        assert total <= max(number, number // 2 + sum(ranks.values()))


def test_a_small_policy_and_emulated_devices_have_one_thread():
    assert threads(16, {"actor": 1, "rollout": 1}, is_small=True) == {"actor": 1, "rollout": 1}
    assert cores_of(read_recipe(None, ["trainer.engine=emulated"]), DEFAULT, has_gpus=False).is_small
    assert cores_of(read_recipe(None, ["rollout.engine=emulated"]), DEFAULT, has_gpus=False).is_small


def test_processes_with_gpus_have_a_few_threads_and_a_trainer_that_updates_on_the_host_its_share():
    on_gpus = {"actor": 4, "rollout": 4}
    assert threads(64, on_gpus, has_gpus=True) == {"actor": 4, "rollout": 4}
    assert threads(8, on_gpus, has_gpus=True) == {"actor": 1, "rollout": 1}
    assert threads(64, on_gpus, has_gpus=True, updates_on_host=True) == {"actor": 8, "rollout": 4}


def test_roles_without_a_policy_have_one_thread():
    cores = Cores(16, {"actor": 1, "rollout": 1})
    assert [cores.threads(role) for role in ("relay", "task", "hub")] == [1, 1, 1]


def test_the_recipe_s_numbers_count_and_the_trainer_takes_what_they_leave(monkeypatch):
    monkeypatch.setattr(cores_module, "usable_cores", lambda: 16)
    cores = cores_of(read_recipe(None, ["rollout.threads=6"]), DEFAULT, has_gpus=False)
    assert (cores.threads("actor"), cores.threads("rollout")) == (10, 6)
    both = cores_of(read_recipe(None, ["trainer.threads=3", "rollout.threads=20"]), DEFAULT, has_gpus=False)
    assert (both.threads("actor"), both.threads("rollout")) == (3, 20)


def test_the_schedule_and_the_staleness_bound_say_who_takes_turns():
    def takes_turns(*words: str) -> bool:
        return cores_of(read_recipe(None, list(words)), DEFAULT, has_gpus=False).takes_turns

    assert not takes_turns()
    assert takes_turns("run.schedule=sync") and takes_turns("queue.max_staleness=0")
    assert not takes_turns("run.schedule=one_step")


def test_a_host_counts_its_own_ranks_and_not_its_relays(monkeypatch):
    monkeypatch.setattr(cores_module, "usable_cores", lambda: 8)
    later = cores_of(read_recipe(None), ["rollout", "rollout", "relay"], has_gpus=False)
    assert dict(later.ranks) == {"rollout": 2} and later.threads("rollout") == 4


def test_a_policy_s_size_is_read_without_a_download(tmp_path: Path):
    assert is_small(str(STORIES))
    assert not is_small("nobody/such-a-model") and not is_small("") and not is_small(str(tmp_path))


def test_hardware_threads_of_one_core_count_once(tmp_path: Path):
    for cpu in range(4):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    assert [num_cores(cpus, tmp_path) for cpus in ({0, 1, 2, 3}, {0, 2}, {1}, {7, 8})] == [2, 1, 1, 2]


def test_a_cgroup_s_share_of_time_bounds_the_cores_in_both_versions(tmp_path: Path):
    own, root = tmp_path / "own", tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "cpu,cpuacct" / "c").mkdir(parents=True)
    own.write_text("0::/a/b\n")
    (root / "a" / "b" / "cpu.max").write_text("max 100000\n")
    (root / "a" / "cpu.max").write_text("250000 100000\n")
    assert list(cpu_quotas(own, root)) == [2.5]
    own.write_text("9:memory:/c\n4:cpu,cpuacct:/c\n")
    for name, text in (("cpu.cfs_quota_us", "150000"), ("cpu.cfs_period_us", "100000")):
        (root / "cpu,cpuacct" / "c" / name).write_text(text)
    assert list(cpu_quotas(own, root)) == [1.5]
    (root / "cpu,cpuacct" / "c" / "cpu.cfs_quota_us").write_text("-1")
    assert list(cpu_quotas(own, root)) == []


def test_the_cores_are_those_of_the_affinity_mask_and_at_most_the_quota(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1000, 1001, 1002})
    monkeypatch.setattr(cores_module, "cpu_quotas", lambda *_: iter(()))
    assert usable_cores() == 3
    for quota, expected in ((2.5, 2), (0.5, 1)):
        monkeypatch.setattr(cores_module, "cpu_quotas", lambda *_, quota=quota: iter([quota]))
        assert usable_cores() == expected


def test_a_user_s_number_of_threads_that_has_no_effect_is_named_once_with_the_settings(monkeypatch):
    cores = Cores(3, {"actor": 1, "rollout": 1}, takes_turns=True)

    def warnings(value: str) -> list[str]:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        return list(ignored_threads(cores))

    assert warnings("3") == [] and warnings("") == []
    (text,) = warnings("4")
    assert "OMP_NUM_THREADS=4" in text and "actor 3, rollout 3" in text and "trainer.threads" in text
    assert len(warnings("1")) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert warnings("1") == [], "torchrun sets it itself"
    assert len(warnings("4")) == 1


def test_a_dry_run_prints_the_threads_of_each_process(capsys):
    main(["--dry-run", "trainer.threads=5", "rollout.threads=1", f"model.path={STORIES}"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-2:] for line in lines if line[:1] == ["rank"]] == [["5", "threads"], ["1", "thread"], ["1", "thread"]]
