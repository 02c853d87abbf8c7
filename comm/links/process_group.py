"""Process groups of the two ends of a staged link: over NCCL between GPUs, over Gloo between host memories."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

from ..errors import LinkBroken

if TYPE_CHECKING:
    from ..store import StoreClient

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CLEAN_UP_ONLY = "2"
_environment_lock = threading.Lock()


def open_group(
    backend: str, store: "StoreClient", name: str, end: int, deadline_s: float, interface: str
) -> ProcessGroup:
    """A group of two over gloo or nccl, on a prefix of its own; returns once both ends have joined. Raises `LinkBroken`.

    `store` gets the deadline as its timeout, so it is a client for this call alone.
    """
    prefix = PrefixStore(f"link/{name}", store)  # pyright: ignore[reportArgumentType]
    prefix.set_timeout(timedelta(seconds=deadline_s))
    try:
        if backend == "gloo":
            from torch.distributed import ProcessGroupGloo

            options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            options._devices = [ProcessGroupGloo.create_device(hostname=interface)]
            options._timeout = timedelta(seconds=deadline_s)
            return ProcessGroupGloo(prefix, end, 2, options)  # pyright: ignore[reportReturnType]
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        # The watchdog of NCCL ends the process at its timeout, so the users of a group check the clock instead.
        options._timeout = timedelta(days=1)
        with _errors_break_the_link():
            return ProcessGroupNCCL(prefix, end, 2, options)  # pyright: ignore[reportReturnType]
    except RuntimeError as error:
        raise LinkBroken(f"link {name}: {error}") from error


@contextmanager
def _errors_break_the_link() -> Iterator[None]:
    """A group that is made meanwhile aborts its communicators on an error of NCCL, such as a dead neighbour.

    By default NCCL's watchdog ends the process. A group reads this from the environment when it is made; those of the
    trainer's ranks keep the default.
    """
    with _environment_lock:
        before = os.environ.get(_ERROR_HANDLING)
        os.environ[_ERROR_HANDLING] = _CLEAN_UP_ONLY
        try:
            yield
        finally:
            del os.environ[_ERROR_HANDLING]
            if before is not None:
                os.environ[_ERROR_HANDLING] = before
