"""Process groups of the two ends of a staged link: over NCCL between GPUs, over Gloo between host memories."""

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

from ..errors import LinkBroken

if TYPE_CHECKING:
    from ..store import StoreClient


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
        return ProcessGroupNCCL(prefix, end, 2, options)  # pyright: ignore[reportReturnType]
    except RuntimeError as error:
        raise LinkBroken(f"link {name}: {error}") from error
