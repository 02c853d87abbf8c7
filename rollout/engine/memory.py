"""The number of pages of the KV cache, from the settings and the free memory."""

import os
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...comm.environment import GPU_PROCESSES
from ...comm.errors import SettingError
from ...comm.host_memory import free_bytes

if TYPE_CHECKING:
    from ...trainer.policy.model import Policy

_CONTEXT_BYTES = 1 << 30
"""Most memory that a process takes on a GPU besides its tensors."""
_KEPT_BYTES = 1 << 30
"""Part of the cache's default size on a CPU for pages that no sequence uses: an untouched page takes no memory there."""


class CachePlan(NamedTuple):
    """The number of pages, the tokens and bytes of one page, and the most pages that are kept for the prefix cache."""

    num_pages: int
    page_size: int
    page_bytes: int
    max_kept: int
    grows: bool = False
    """Whether a page takes memory from its first use on alone; else the cache takes all of its memory at once."""

    def __str__(self) -> str:
        size = self.num_pages * self.page_bytes / 1e9
        most = "at most " if self.grows else ""
        return f"{self.num_pages} pages of {self.page_size} tokens, {most}{size:.3g} GB of KV cache"


class AvailableMemory(NamedTuple):
    """Bytes: the most that a cache may take, and the most that it takes by default. `bound` names the limit."""

    free: int
    usual: int
    bound: str


def available_memory(device: torch.device, gpu_share: float) -> AvailableMemory:
    """Memory for the cache. On a GPU it is `gpu_share` less the used memory; if processes of a run share the GPU, at most an equal part less the memory
    of this process, since the others may take theirs later. On a host it is the free memory; by default half of it, since other
    processes start at the same time."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        num_processes = int(os.environ.get(GPU_PROCESSES, "1"))
        own = int(gpu_share * total) // num_processes - torch.cuda.memory_reserved(device) - _CONTEXT_BYTES
        left = max(0, min(int(gpu_share * total) - (total - free), own))
        shared = f", shared by {num_processes} processes" if num_processes > 1 else ""
        return AvailableMemory(left, left, f"generator.gpu_share={gpu_share:g} of the GPU{shared}")
    free = free_bytes()
    return AvailableMemory(free, free // 2, "the free memory")


def token_bytes(policy: "Policy") -> int:
    """Bytes of the keys and values of one token, on this rank."""
    num_kv_heads = policy.num_kv_heads // policy.tensor_parallel.size
    return 2 * policy.num_layers * num_kv_heads * policy.head_dim * policy.dtype.itemsize


def sequences_that_fit(policy: "Policy", num_tokens: int, memory: AvailableMemory) -> int:
    """Sequences of so many tokens whose keys and values the default cache holds together; at least 1."""
    return max(1, memory.usual // (token_bytes(policy) * num_tokens))


def plan_cache(
    policy: "Policy", page_size: int, max_running: int, kv_gb: float | None, memory: AvailableMemory
) -> CachePlan:
    """Pages for `kv_gb`, or by default for `max_running` sequences of full context as far as the memory allows.

    All ranks of a replica get the same number, that of the rank with the least memory. Raises SettingError for more than the
    available memory, and for less than one sequence of full context needs.
    """
    page_bytes = page_size * token_bytes(policy)
    # Page 0 is not usable, and a fork needs one page more.
    least = -(-policy.context // page_size) + 2
    if kv_gb is None:
        num_pages = min(max_running * (least - 2) + 2, memory.usual // page_bytes)
    else:
        num_pages = int(kv_gb * 1e9) // page_bytes
        if kv_gb * 1e9 > memory.free:
            raise SettingError(
                f"generator.kv_gb: {kv_gb} GB of KV cache, but {memory.bound} leaves {memory.free / 1e9:.3g} GB"
            )
    if num_pages < least:
        given = memory.bound if kv_gb is None else f"{kv_gb} GB"
        raise SettingError(
            f"generator.kv_gb: {given} does not hold one sequence of {policy.context} tokens; "
            f"at least {least * page_bytes / 1e9:.3g} GB are needed"
        )
    num_pages = policy.tensor_parallel.all_reduce_min(num_pages, policy.device)
    is_bounded = kv_gb is None and policy.device.type == "cpu"
    max_kept = min(num_pages, _KEPT_BYTES // page_bytes) if is_bounded else num_pages
    return CachePlan(num_pages, page_size, page_bytes, max_kept, policy.device.type == "cpu")
