"""Host memory that a GPU copies from and to directly: it is registered with CUDA, and unregistered before it is unmapped.

The driver keeps the pages of a registration, not its address. Memory that is mapped later at an address which is still registered
would be copied from the old pages, without an error.
"""

import contextlib
import logging
import weakref
from typing import Any

import numpy as np

_log = logging.getLogger(__name__)


def pin(buffer: np.ndarray) -> bool:
    """Register a buffer for as long as this array lives; False without a GPU, and where CUDA refuses, which makes copies slower."""
    import torch  # here, since a relay without a GPU starts without it

    if not torch.cuda.is_available() or not buffer.nbytes:
        return False
    error = int(_runtime().cudaHostRegister(buffer.ctypes.data, buffer.nbytes, 0))
    if error:
        _log.warning("CUDA does not pin %d bytes of host memory (error %d); copies are slower", buffer.nbytes, error)
        _clear_error()
        return False
    weakref.finalize(buffer, _unpin, buffer.ctypes.data).atexit = False  # CUDA may have ended before
    return True


def host_buffer(num_bytes: int) -> np.ndarray:
    """Zeroed host memory, uint8 [num_bytes], with all pages mapped, and pinned where there is a GPU.

    It takes no more than these bytes, where torch's allocator of pinned memory takes the next power of two.
    """
    buffer = np.full(num_bytes, 0, np.uint8)  # `np.zeros` maps no pages
    pin(buffer)
    return buffer


def _unpin(address: int) -> None:
    """End the registration of the buffer at this address."""
    if error := int(_runtime().cudaHostUnregister(address)):
        _log.warning("CUDA does not release pinned host memory (error %d)", error)
        _clear_error()


def _runtime() -> Any:
    import torch

    return torch.cuda.cudart()


def _clear_error() -> None:
    """Take the thread's last CUDA error, which the next kernel would report as its own."""
    import torch

    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
