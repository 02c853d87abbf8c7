"""Links over a process group of two ranks: Gloo between the memories of two hosts.

Gloo does not wake an end whose neighbour dies in the middle of a message, so each operation ends at its deadline at the
latest, and a deadline passed breaks the link.
"""

from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

from .errors import LinkBroken
from .store import Store

_NEVER = timedelta(days=1)
"""At its timeout the watchdog of NCCL ends the process; who uses the group looks at the clock instead."""


class GroupLink:
    """One end of a process group of two."""

    backend = "gloo"

    def __init__(self, group: ProcessGroup, end: int) -> None:
        self._group: ProcessGroup | None = group
        self._other = 1 - end

    def send(self, buffer: np.ndarray, deadline_s: float) -> None:
        """Send all bytes."""
        self._run("send", buffer, deadline_s)

    def receive(self, buffer: np.ndarray, deadline_s: float) -> None:
        """Fill the buffer."""
        self._run("recv", buffer, deadline_s)

    def close(self) -> None:
        """Drop the group, and its sockets with it."""
        self._group = None

    def _run(self, what: str, buffer: np.ndarray, deadline_s: float) -> None:
        if not buffer.nbytes:
            return
        if self._group is None:
            raise LinkBroken(f"{what}: the link is closed")
        try:
            getattr(self._group, what)([as_tensor(buffer)], self._other, 0).wait(timedelta(seconds=deadline_s))
        except RuntimeError as error:
            self.close()
            raise LinkBroken(f"{what}: {error}") from error


def as_tensor(buffer: np.ndarray) -> torch.Tensor:
    """The buffer's memory as a tensor; a copy of one that must not be written, of which torch would warn."""
    return torch.from_numpy(buffer if buffer.flags.writeable else buffer.copy())


def open_group(backend: str, store: Store, name: str, end: int, deadline_s: float, interface: str) -> ProcessGroup:
    """A group of two on a prefix of its own, over gloo or nccl; returns once both ends are there. Raises `LinkBroken`."""
    prefix = PrefixStore(f"link/{name}", store)  # pyright: ignore[reportArgumentType]
    prefix.set_timeout(timedelta(seconds=deadline_s))
    try:
        return _gloo(prefix, end, deadline_s, interface) if backend == "gloo" else _nccl(prefix, end)
    except RuntimeError as error:
        raise LinkBroken(f"link {name}: {error}") from error


def _gloo(prefix: PrefixStore, end: int, deadline_s: float, interface: str) -> ProcessGroup:
    from torch.distributed import ProcessGroupGloo

    options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [ProcessGroupGloo.create_device(hostname=interface)]
    options._timeout = timedelta(seconds=deadline_s)
    return ProcessGroupGloo(prefix, end, 2, options)  # pyright: ignore[reportReturnType]


def _nccl(prefix: PrefixStore, end: int) -> ProcessGroup:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    return ProcessGroupNCCL(prefix, end, 2, options)  # pyright: ignore[reportReturnType]
