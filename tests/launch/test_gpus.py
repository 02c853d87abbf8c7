"""The GPUs that a run may use: those of its job, by a program that stands for nvidia-smi, and by the driver's files."""

import os
import re
from itertools import product

import pytest

from headrace.launch.config import gpus
from headrace.launch.config.dry_run import DryRun
from headrace.launch.config.gpus import Gpus
from headrace.launch.config.load import read_recipe
from headrace.launch.run import main

UUIDS = [f"GPU-{n}a7f0c11-0000-4000-8000-000000000000" for n in range(8)]


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host with some GPUs, by what its nvidia-smi prints (None: it has none) and by its folder of device files."""

    def build(listing: str | None, job: str | None = None, num_files: int = 0) -> Gpus:
        monkeypatch.setattr(gpus, "_PLACES", ())
        monkeypatch.setattr(gpus, "_DRIVER", tmp_path)
        for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{n}" for n in range(num_files))):
            (tmp_path / name).touch()
        folder = tmp_path / "bin"
        folder.mkdir()
        if listing is not None:
            program = folder / "nvidia-smi"
            program.write_text(f"#!/bin/sh\ncat <<END\n{listing}\nEND\n")
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if job is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", job)
        return Gpus.of_this_host()

    return build


def listing_of(*mebibytes: int | str) -> str:
    return "\n".join(f"{n}, {UUIDS[n]}, {size}" for n, size in enumerate(mebibytes))


def test_without_a_job_s_list_all_gpus_of_the_host_count_and_the_smallest_bounds_the_memory(host):
    assert host(listing_of(81559, 40960)) == Gpus(("0", "1"), 40960 * (1 << 20) / 1e9)


def test_a_job_s_list_alone_counts_in_its_order(host):
    found = host(listing_of(81559, 81559, 40960, 81559), job="3,1")
    assert found == Gpus(("3", "1"), 81559 * (1 << 20) / 1e9)


@pytest.mark.parametrize("job", [f" {UUIDS[2]} ", "GPU-2a7f"])
def test_a_job_may_name_its_gpus_by_uuid_or_by_its_beginning(host, job):
    assert host(listing_of(81559, 81559, 40960), job) == Gpus((job.strip(),), 40960 * (1 << 20) / 1e9)


@pytest.mark.parametrize(
    ("job", "names"), [("", ()), ("-1", ()), ("1,-1,0", ("1",)), ("0,7", ("0",)), ("NoDevFiles", ())]
)
def test_as_for_cuda_the_list_ends_at_the_first_entry_that_is_no_gpu(host, job, names):
    assert host(listing_of(81559, 81559), job).names == names


def test_without_nvidia_smi_the_driver_s_files_count(host):
    assert host(None, num_files=3) == Gpus(("0", "1", "2"))


def test_without_nvidia_smi_a_job_s_list_is_believed(host):
    assert host(None, job="4,5").names == ("4", "5")


def test_a_host_without_a_driver_has_no_gpu(host):
    assert host(None) == Gpus()


def test_memory_that_nvidia_smi_does_not_know_is_unknown(host):
    assert host(listing_of("[N/A]")) == Gpus(("0",), 0.0)


def test_a_dry_run_places_roles_on_the_job_s_gpus(host, capsys):
    host(listing_of(*[81559] * 8), job="4,5")
    assert main(["roles.rollout=2", "--dry-run"]) == 2  # for want of a policy
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("rank ")]
    assert [" ".join(line[4:-2]) for line in lines] == [
        "actor-0 GPU 4",
        "rollout-0 GPU 5",
        "rollout-1 GPU 4",
        "relay-0 + hub CPU",
    ]


@pytest.mark.parametrize("words", ["", "trainer.shard_ranks=2", "trainer.shard_ranks=3", "comm.link=nccl"])
def test_the_roles_advised_for_unused_gpus_pass_the_checks_and_use_more(words):
    advised = 0
    for tp, references, num in product((1, 2, 4, 8), (0, 1, 3), (3, 4, 7, 8, 16)):
        given = [*words.split(), f"rollout.tp={tp}", f"roles.rollout={tp}", f"roles.reference={references}"]
        given += [f"algorithm.kl_coef={0.1 * references}", f"roles.actor={3 if words.endswith('3') else 2}"]
        dry_run = DryRun(gpus=Gpus(tuple(map(str, range(num))), 80.0))
        recipe = read_recipe(None, given)
        if recipe.roles.actor + tp + references + (recipe.comm.link == "nccl") >= num:
            continue  # no GPU is unused
        before = "".join(warning for warning in dry_run.of(recipe) if "stay unused" in warning)
        if found := re.search(r"to (roles.actor=(\d+)) (roles.rollout=(\d+))", before):
            advised += 1
            after = "".join(warning for warning in dry_run.of(read_recipe(None, [*given, found[1], found[3]])))
            unused = [int(text.partition(" of ")[0]) if "stay unused" in text else 0 for text in (before, after)]
            assert unused[1] < min(unused[0], tp), (given, num, found[0])
    assert advised > 5


@pytest.mark.parametrize(
    ("words", "split"),
    [
        ("rollout.tp=4 roles.rollout=4", "roles.actor=4 roles.rollout=4"),
        ("roles.reference=1 algorithm.kl_coef=0.1", "roles.actor=1 roles.rollout=6"),
        ("rollout.tp=4 roles.rollout=4 trainer.shard_ranks=3 roles.actor=3", ""),
        ("generator.exact=true", "roles.actor=1 roles.rollout=7"),
    ],
)
def test_the_roles_advised_for_unused_gpus(words, split):
    told = "".join(DryRun(gpus=Gpus(tuple("01234567"), 80.0)).of(read_recipe(None, words.split())))
    assert "of 8 GPUs of a host have no rank and stay unused" in told
    assert split in told and ("roles." in told) is bool(split)
