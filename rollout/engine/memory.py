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
    num_states: int = 0
    """Places of recurrent states, if the policy has any."""
    state_bytes: int = 0
    grows: bool = False
    """Whether a page takes memory from its first use on alone; else the cache takes all of its memory at once."""

    def __str__(self) -> str:
        size = self.num_pages * self.page_bytes / 1e9
        most = "at most " if self.grows else ""
        pages = f"{self.num_pages} pages of {self.page_size} tokens, {most}{size:.3g} GB of KV cache"
        if not self.num_states:
            return pages
        return f"{pages}, {self.num_states} recurrent states, {most}{self.num_states * self.state_bytes / 1e9:.3g} GB"


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
    return 2 * len(policy.kv_layers) * num_kv_heads * policy.head_dim * policy.dtype.itemsize


def state_bytes(policy: "Policy") -> int:
    """Bytes of one recurrent state; 0 for a policy without them."""
    return sum(net.shape.num_bytes(policy.dtype) for net in policy.recurrent.values())


def sequences_that_fit(policy: "Policy", num_tokens: int, memory: AvailableMemory) -> int:
    """Sequences of so many tokens whose keys, values and states the default cache holds together; at least 1."""
    return max(1, memory.usual // (token_bytes(policy) * num_tokens + 2 * state_bytes(policy)))


def plan_cache(
    policy: "Policy", page_size: int, max_running: int, kv_gb: float | None, memory: AvailableMemory
) -> CachePlan:
    """Pages for `kv_gb`, or by default for `max_running` sequences of full context as far as the memory allows. Recurrent states are part of it.

    All ranks of a replica get the same number, that of the rank with the least memory. Raises SettingError for more than the
    available memory, and for less than one sequence of full context needs.
    """
    budget = memory.usual if kv_gb is None else int(kv_gb * 1e9)
    num_states = _num_states(policy, max_running, budget)
    budget -= num_states * state_bytes(policy)
    page_bytes = page_size * token_bytes(policy)
    # Page 0 is not usable, and a fork needs one page more.
    least = -(-policy.context // page_size) + 2
    if kv_gb is None:
        num_pages = min(max_running * (least - 2) + 2, budget // page_bytes)
    else:
        num_pages = budget // page_bytes
        if kv_gb * 1e9 > memory.free:
            raise SettingError(
                f"generator.kv_gb: {kv_gb} GB of KV cache, but {memory.bound} leaves {memory.free / 1e9:.3g} GB"
            )
    if num_pages < least:
        given = memory.bound if kv_gb is None else f"{kv_gb} GB"
        states = num_states * state_bytes(policy)
        beside = f", with the {num_states} recurrent states of generator.max_running={max_running}" if states else ""
        raise SettingError(
            f"generator.kv_gb: {given} does not hold one sequence of {policy.context} tokens; "
            f"at least {(least * page_bytes + states) / 1e9:.3g} GB are needed{beside}"
        )
    num_pages = policy.tensor_parallel.all_reduce_min(num_pages, policy.device)
    is_bounded = kv_gb is None and policy.device.type == "cpu"
    max_kept = min(num_pages, _KEPT_BYTES // page_bytes) if is_bounded else num_pages
    is_lazy = policy.device.type == "cpu"
    return CachePlan(num_pages, page_size, page_bytes, max_kept, num_states, state_bytes(policy), is_lazy)


def _num_states(policy: "Policy", max_running: int, budget: int) -> int:
    """Places of recurrent states: two for each row and one for a prefill. As many again are kept for prefixes, within a quarter of the memory."""
    if not policy.recurrent:
        return 0
    least = 2 * max_running + 1
    return max(least, min(2 * least, budget // 4 // state_bytes(policy)))
