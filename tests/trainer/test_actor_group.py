"""The process group of the trainer's ranks."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import (
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    device_mesh,
)
from torch.distributed.device_mesh import init_device_mesh

from headrace.trainer.actor_group import ActorGroup


class OnlyGpu:
    """The one GPU that a process sees, as torch's device meshes do."""

    def __init__(self) -> None:
        self.chosen: list[int | torch.device] = []

    def set_device(self, device: int | torch.device) -> None:
        self.chosen.append(device)

    def is_initialized(self) -> bool:
        return bool(self.chosen)


def test_a_rank_of_a_host_with_several_takes_the_gpu_that_it_sees_and_not_the_one_of_its_number(
    monkeypatch: pytest.MonkeyPatch,
):
    gpu, open_group = OnlyGpu(), dist.init_process_group

    def open_gloo(backend: str, **options: object) -> None:
        open_group("gloo", store=options["store"], rank=0, world_size=1, timeout=timedelta(seconds=60))  # type: ignore

    monkeypatch.setenv("LOCAL_RANK", "1")  # torchrun's
    monkeypatch.setattr(torch.cuda, "set_device", gpu.set_device)
    monkeypatch.setattr(device_mesh, "_get_device_handle", lambda kind: gpu)
    monkeypatch.setattr(dist, "init_process_group", open_gloo)
    group = ActorGroup(0, 1, torch.device("cuda", 0), 60.0)
    group.connect(HashStore())
    try:
        init_device_mesh("cuda", (1,))
    finally:
        group.close()
    assert gpu.chosen == [torch.device("cuda", 0)]
