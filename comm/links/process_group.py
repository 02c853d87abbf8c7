"""Process groups of two ranks, one for each end of a staged link: over NCCL between GPUs, over Gloo between host memories."""

from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

from ..errors import LinkBroken
from ..store import StoreClient

_NO_TIMEOUT = timedelta(days=1)
"""At its timeout the watchdog of NCCL ends the process; who uses the group looks at the clock instead."""


def as_tensor(buffer: np.ndarray) -> torch.Tensor:
    """The buffer's memory as a tensor; a copy of one that must not be written, of which torch would warn."""
    return torch.from_numpy(buffer if buffer.flags.writeable else buffer.copy())


def open_group(
    backend: str, store: StoreClient, name: str, end: int, deadline_s: float, interface: str
) -> ProcessGroup:
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
    options._timeout = _NO_TIMEOUT
    return ProcessGroupNCCL(prefix, end, 2, options)  # pyright: ignore[reportReturnType]
