"""Links over a process group of two ranks: Gloo between hosts' memories, NCCL between two GPUs.

Gloo does not wake an end whose neighbour dies in the middle of a message, so each operation ends at its deadline at the
latest, and a deadline passed breaks the link. NCCL moves host bytes through a bucket on each GPU and refuses two ranks on
one GPU (before NCCL 2.30).
"""

from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

from .errors import LinkBroken
from .store import Store

_BUCKET_BYTES = 32 << 20


class GroupLink:
    """One end of a process group of two."""

    def __init__(self, backend: str, group: ProcessGroup, end: int) -> None:
        self.backend = backend
        self._group: ProcessGroup | None = group
        self._other = 1 - end
        self._bucket = torch.empty(_BUCKET_BYTES, dtype=torch.uint8, device="cuda") if backend == "nccl" else None

    @staticmethod
    def open(backend: str, store: Store, name: str, end: int, deadline_s: float, interface: str) -> "GroupLink":
        """Build the group on a prefix of its own; returns once both ends are there."""
        prefix = PrefixStore(f"link/{name}", store)  # pyright: ignore[reportArgumentType]
        prefix.set_timeout(timedelta(seconds=deadline_s))
        try:
            group = _gloo(prefix, end, deadline_s, interface) if backend == "gloo" else _nccl(prefix, end, deadline_s)
        except RuntimeError as error:
            raise LinkBroken(f"link {name}: {error}") from error
        return GroupLink(backend, group, end)

    def send(self, buffer: np.ndarray, deadline_s: float) -> None:
        """Send all bytes."""
        for piece in self._pieces(buffer):
            tensor = piece if self._bucket is None else self._bucket[: piece.numel()].copy_(piece)
            self._run("send", tensor, deadline_s)

    def receive(self, buffer: np.ndarray, deadline_s: float) -> None:
        """Fill the buffer."""
        for piece in self._pieces(buffer):
            tensor = piece if self._bucket is None else self._bucket[: piece.numel()]
            self._run("recv", tensor, deadline_s)
            if self._bucket is not None:
                piece.copy_(tensor)

    def close(self) -> None:
        """Drop the group, and its sockets with it."""
        self._group = None

    def _pieces(self, buffer: np.ndarray) -> tuple[torch.Tensor, ...]:
        if not buffer.nbytes:
            return ()
        if not buffer.flags.writeable:
            buffer = buffer.copy()  # torch warns of tensors over memory that must not be written
        tensor = torch.from_numpy(buffer)
        return (tensor,) if self._bucket is None else torch.split(tensor, _BUCKET_BYTES)

    def _run(self, what: str, tensor: torch.Tensor, deadline_s: float) -> None:
        if self._group is None:
            raise LinkBroken(f"{what}: the link is closed")
        try:
            getattr(self._group, what)([tensor], self._other, 0).wait(timedelta(seconds=deadline_s))
        except RuntimeError as error:
            self.close()
            raise LinkBroken(f"{what}: {error}") from error


def _gloo(prefix: PrefixStore, end: int, deadline_s: float, interface: str) -> ProcessGroup:
    from torch.distributed import ProcessGroupGloo

    options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [ProcessGroupGloo.create_device(hostname=interface)]
    options._timeout = timedelta(seconds=deadline_s)
    return ProcessGroupGloo(prefix, end, 2, options)  # pyright: ignore[reportReturnType]


def _nccl(prefix: PrefixStore, end: int, deadline_s: float) -> ProcessGroup:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=deadline_s)
    return ProcessGroupNCCL(prefix, end, 2, options)  # pyright: ignore[reportReturnType]
