"""Memory of a device that other processes of the host can open: of a GPU by CUDA IPC, of the CPU by the path of a segment.

The GPU's part is PyTorch's own way to share a storage, as `torch.multiprocessing` and vLLM's and verl's updates of weights use
it, without pickle. By the rules of CUDA IPC, the process that allocated a buffer keeps it while another one has it open; a handle
ends with that process; the process itself cannot open it. A GPU that this process does not see can be opened if the two GPUs have
peer access. The allocator may not be `cudaMallocAsync`.
"""

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from ..errors import PeerGone
from ..shared_memory import Segment


class CudaHandle(msgspec.Struct, frozen=True, array_like=True):
    """The fields of `torch.UntypedStorage._share_cuda_`, in its order."""

    device: int
    memory: bytes
    num_bytes: int
    offset: int
    """Of the buffer in the allocation that `memory` names: the allocator cuts allocations into blocks."""
    counter: bytes
    counter_offset: int
    event: bytes
    is_event_recorded: bool


Handle = CudaHandle | str
"""Memory of a GPU, or the path of a segment."""


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """Memory of a device: `tensor`, uint8 [num_bytes]; `handle` opens it in another process."""

    tensor: Tensor
    handle: Handle
    _segment: Segment | None = None

    @staticmethod
    def allocate(count: int, num_bytes: int, device: torch.device) -> "tuple[DeviceBuffer, ...]":
        """Zeroed buffers. Raises `RuntimeError` if the device has no room for all of them or cannot share memory."""
        if device.type == "cpu":
            segments = [Segment.create_anonymous("headrace device") for _ in range(count)]
            for segment in segments:
                segment.allocate(1, num_bytes)
            return tuple(DeviceBuffer(torch.from_numpy(each.slot(0)), each.path, each) for each in segments)
        # PyTorch keeps memory that was shared until another process has closed it: all is there before any is shared.
        tensors = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(count)]
        return tuple(DeviceBuffer(each, CudaHandle(*each.untyped_storage()._share_cuda_())) for each in tensors)

    @staticmethod
    def open(handle: Handle) -> "DeviceBuffer":
        """Another process's buffer, for copies on this process's device. Raises `PeerGone`."""
        if isinstance(handle, str):
            segment = Segment.open(handle)
            return DeviceBuffer(torch.from_numpy(segment.slot(0)), handle, segment)
        try:
            torch.cuda.init()
            device = torch.cuda.current_device()  # the number in the handle counts the other process's GPUs
            found = msgspec.structs.replace(handle, device=device)
            storage = torch.UntypedStorage._new_shared_cuda(*msgspec.structs.astuple(found))
        except (RuntimeError, AssertionError) as error:  # torch without CUDA raises an AssertionError
            raise PeerGone(f"memory of a GPU that cannot be opened here: {error}") from error
        return DeviceBuffer(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), handle)

    def close(self) -> None:
        """Close what belongs to the handle; the memory stays while `tensor` does."""
        if self._segment is not None:
            self._segment.close()
