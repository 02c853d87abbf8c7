"""The memory of a host: its limits by the kernel and by cgroups, and what a process holds."""

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from headrace.comm import host_memory
from headrace.comm.host_memory import cgroups, free_bytes, give_back_heap, held_by, memory_bytes


@pytest.fixture
def job(monkeypatch, tmp_path):
    """A tree of cgroups in which this process is in `slurm/job_7/step_0`; `limit` writes the files of one of them."""
    tree, own = tmp_path / "tree", tmp_path / "own"
    (tree / "slurm/job_7/step_0").mkdir(parents=True)
    own.write_text("0::/slurm/job_7/step_0\n")
    monkeypatch.setattr(host_memory, "_ROOT", tree)
    monkeypatch.setattr(host_memory, "_OWN", own)

    def limit(folder: str, **files: object) -> None:
        for name, content in files.items():
            (tree / folder / name.replace("_", ".", 1)).write_text(f"{content}\n")

    return limit


def test_the_limit_of_a_cgroup_above_the_own_one_counts(job):
    job("slurm/job_7/step_0", memory_max="max", memory_current=0)
    job("slurm/job_7", memory_max=5 << 20, memory_current=3 << 20, memory_stat=f"anon 7\ninactive_file {1 << 20}")
    assert memory_bytes() == 5 << 20
    assert free_bytes() == 3 << 20, "pages of files that are not in use can be given back"


def test_without_a_limit_the_host_s_memory_counts(job):
    job("slurm", memory_max="max")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_bytes() == pytest.approx(total, rel=0.1) and 0 < free_bytes() <= memory_bytes()
    assert Path("/") not in [*cgroups()]


def test_shared_memory_is_not_a_process_s_own():
    before = held_by(os.getpid())
    with mmap.mmap(-1, 64 << 20) as shared:
        shared.write(b"x" * (64 << 20))
        during = held_by(os.getpid())
    assert during.resident - before.resident > 60 << 20
    assert during.own - before.own < 32 << 20 and during.most_own(during.shared) >= during.own
    assert held_by(0).most_own(0) == 0


def test_a_heap_with_holes_is_given_back():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes, size = ctypes.c_void_p, [ctypes.c_void_p], 64 << 10
    blocks = [libc.malloc(size) for _ in range(2048)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:  # the last one keeps the end of the heap in place
        libc.free(block)
    before = held_by(os.getpid()).own
    give_back_heap()
    after = held_by(os.getpid()).own
    libc.free(blocks[-1])
    assert before - after > 2048 * size / 2
