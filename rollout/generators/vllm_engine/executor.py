"""The rank of a replica as vLLM sees it: one of the ranks that the project has started, which repeat the calls of the first."""

import os

import torch
import torch.distributed as dist
from vllm.v1.executor.uniproc_executor import (  # pyright: ignore[reportMissingImports] - an extra
    ExecutorWithExternalLauncher,
)


class RankExecutor(ExecutorWithExternalLauncher):
    """Joins the process's default group, in which the ranks of the replica have met, on the one device that the process sees."""

    def _distributed_args(self) -> tuple[str, int, int]:
        """A name that the ranks share and other replicas of the host do not have, the rank, and the number of its device."""
        first = torch.tensor([os.getpid()])
        dist.broadcast(first, src=0)
        return f"replica-{int(first)}", dist.get_rank(), 0
