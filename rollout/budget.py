"""How many pages the KV cache gets, from what the user allows and what the machine has."""

import os
from typing import NamedTuple

import torch

from ..comm.errors import SettingError
from ..trainer.model import Policy


class Budget(NamedTuple):
    """Pages of the cache, the tokens and the bytes of one."""

    num_pages: int
    page_size: int
    page_bytes: int

    def __str__(self) -> str:
        size = self.num_pages * self.page_bytes / 1e9
        return f"{self.num_pages} pages of {self.page_size} tokens, {size:.3g} GB of KV cache"


def page_budget(policy: Policy, page_size: int, max_running: int, kv_gb: float | None, gpu_share: float) -> Budget:
    """Pages for `kv_gb`, or by default for `max_running` sequences of full context as far as memory goes.

    All ranks of a replica get the same number, that of the rank with the least room.
    On a GPU memory goes as far as `gpu_share` of it, less what is taken; on the CPU to half of what is free. Raises
    SettingError for more than there is, and for less than one sequence of full context needs.
    """
    num_kv_heads = policy.num_kv_heads // policy.shard.size
    page_bytes = 2 * policy.num_layers * page_size * num_kv_heads * policy.head_dim * policy.dtype.itemsize
    # One page is nobody's, one more lets a sequence fork.
    least = -(-policy.context // page_size) + 2
    free = _free_bytes(policy.device, gpu_share)
    if kv_gb is None:
        full = max_running * (least - 2) + 2
        share = 1.0 if policy.device.type == "cuda" else 0.5
        num_pages = min(full, int(free * share) // page_bytes)
    else:
        num_pages = int(kv_gb * 1e9) // page_bytes
        if kv_gb * 1e9 > free:
            raise SettingError(f"generator.kv_gb: {kv_gb} GB of KV cache, but only {free / 1e9:.3g} GB are free")
    if num_pages < least:
        given = "the free memory" if kv_gb is None else f"{kv_gb} GB"
        raise SettingError(
            f"generator.kv_gb: {given} does not hold one sequence of {policy.context} tokens; "
            f"at least {least * page_bytes / 1e9:.3g} GB are needed"
        )
    return Budget(policy.shard.least(num_pages, policy.device), page_size, page_bytes)


def _free_bytes(device: torch.device, gpu_share: float) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(gpu_share * total) - (total - free))
    with open("/proc/meminfo") as lines:
        known = dict(line.split(":", 1) for line in lines)
    if "MemAvailable" in known:
        return int(known["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
