"""The memory of the KV cache on a GPU, by its free and total bytes."""

import pytest
import torch

from headrace.rollout.engine.memory import available_memory

GB = 1 << 30


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 80 GB with some of them in use, by this process and by others; and the number of the run's processes on it."""

    def build(own: int, others: int, num_processes: int):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((79 - own - others) * GB, 80 * GB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: own * GB)
        monkeypatch.setenv("HEADRACE_GPU_PROCESSES", str(num_processes))
        return available_memory(torch.device("cuda", 0), 0.75)

    return build


def test_a_process_alone_gets_the_share_less_all_used_memory(gpu):
    assert gpu(own=10, others=0, num_processes=1).usual == 49 * GB
    assert gpu(own=10, others=20, num_processes=1).usual == 29 * GB


@pytest.mark.parametrize("others", [0, 11])
def test_processes_that_start_together_divide_the_share_whatever_the_other_has_taken_so_far(gpu, others):
    memory = gpu(own=10, others=others, num_processes=2)
    assert memory.free == memory.usual == 19 * GB
    assert "shared by 2 processes" in memory.bound


def test_a_part_is_at_most_what_the_others_have_left(gpu):
    assert gpu(own=10, others=40, num_processes=2).usual == 9 * GB
    assert gpu(own=10, others=60, num_processes=2).usual == 0
