"""Process groups: of the two ends of a staged link, and of a role's ranks. Over NCCL between GPUs, over Gloo between host memories.

The ranks of a group find each other on a TCPStore that the first of them serves; its address is in the run's store.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import ProcessGroup, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ..errors import LinkBroken
from .host import bind_process_groups, listen, split_address

if TYPE_CHECKING:
    from ..store.client import StoreClient

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CLEAN_UP_ONLY = "2"
_environment_lock = threading.Lock()


def meeting_store(store: "StoreClient", interface: str, name: str, deadline_s: float, *, is_host: bool) -> TCPStore:
    """The TCPStore of the group `name`, in the process that hosts it or in another; it lives as long as the host's object.

    Raises `StoreGone`, `WaitTimeout` if no host comes, and `LinkBroken` if it has died since.
    """
    key = f"group/{name}"
    timeout = timedelta(days=1)  # never reached: each wait on it has its own deadline
    if is_host:
        listener, address = listen(interface)
        with listener:
            # Binding by the store itself would listen on every interface of the machine.
            hosted = TCPStore(
                *split_address(address), is_master=True, wait_for_workers=False, multi_tenant=False,
                master_listen_fd=listener.detach(), use_libuv=True, timeout=timeout,
            )  # fmt: skip
        store.set(key, address.encode())
        return hosted
    address = store.wait_for(key, deadline_s).decode()
    try:  # the host may have died since, and then nothing answers at its address
        connect_s = timedelta(seconds=deadline_s)
        found = TCPStore(*split_address(address), is_master=False, wait_for_workers=False, timeout=connect_s)
    except dist.DistError as error:
        raise LinkBroken(f"group {name}: its first rank does not answer at {address}: {error}") from error
    found.set_timeout(timeout)
    return found


def open_world(found: TCPStore, interface: str, rank: int, size: int, backend: str, timeout: timedelta) -> ProcessGroup:
    """The default process group of this process, whose ranks meet on `found`; `timeout` bounds each of its collectives."""
    bind_process_groups(interface)
    dist.init_process_group(backend, store=found, rank=rank, world_size=size, timeout=timeout)  # pyright: ignore[reportArgumentType]
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def open_pair(
    backend: str, store: "StoreClient", name: str, end: int, deadline_s: float, interface: str
) -> ProcessGroup:
    """A group of the two ends of a link over gloo or nccl; returns once both have joined. Raises `LinkBroken`."""
    found: Any = meeting_store(store, interface, name, deadline_s, is_host=end == 0)
    found.set_timeout(timedelta(seconds=deadline_s))
    try:
        if backend == "gloo":
            from torch.distributed import ProcessGroupGloo

            options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            options._devices = [ProcessGroupGloo.create_device(hostname=interface)]
            options._timeout = timedelta(seconds=deadline_s)
            return ProcessGroupGloo(found, end, 2, options)  # pyright: ignore[reportReturnType]
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        # The watchdog of NCCL ends the process at its timeout, so the users of a group check the clock instead.
        options._timeout = timedelta(days=1)
        with _errors_break_the_link():
            return ProcessGroupNCCL(found, end, 2, options)  # pyright: ignore[reportReturnType]
    except RuntimeError as error:
        raise LinkBroken(f"link {name}: {error}") from error


@contextmanager
def _errors_break_the_link() -> Iterator[None]:
    """Within the body, new groups abort their communicators on an NCCL error, such as a dead neighbour.

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
