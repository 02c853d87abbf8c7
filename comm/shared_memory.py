"""Shared memory for versions of the weights and copies of the training state: a header page and equal slots in a memfd.

That of a relay or of an actor rank belongs to its supervisor, which passes it to its child in `HEADRACE_SEGMENT_FD`: so it survives the
child's process and ends with the supervisor. Other processes on the host open the owner's descriptor (`comm/memfd.py`).

Readers lock slots with shared byte-range locks and the writer with an exclusive one; the kernel frees the locks of a dead
process. A lock only keeps a slot from being chosen for the next version. The slot's generation, which the reader checks again
after its copy, tells whether the copy is valid.

For copies from and to a GPU, memory is *pinned*: registered with CUDA, and unregistered before it is unmapped. The driver keeps
the pages of a registration, not its address. Memory that is mapped later at an address which is still registered would be
copied from the old pages, without an error.
"""

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import struct
import threading
import weakref
from collections import defaultdict
from enum import Enum
from typing import Any

import numpy as np

from .environment import SEGMENT_FD
from .memfd import HEAD_BYTES, create_memory, open_memory, path_of

_log = logging.getLogger(__name__)

HEADER_BYTES = 4096
_PAGE = 4096
_MADV_POPULATE_WRITE = 23
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_SHAPE_WORDS = 2  # slot bytes and number of slots; the words after them are the owner's


class Lock(Enum):
    """The kind of a lock on a slot."""

    NONE = fcntl.F_UNLCK
    SHARED = fcntl.F_RDLCK
    EXCLUSIVE = fcntl.F_WRLCK


class Segment:
    """One opening of the memfd, with its own locks and its own mapping."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._shared_locks: dict[int, int] = defaultdict(int)
        if os.fstat(fd).st_size < HEADER_BYTES:
            os.ftruncate(fd, HEADER_BYTES)
        self.path = path
        """For `open` in other processes of the host."""
        words = np.frombuffer(mmap.mmap(fd, HEADER_BYTES), dtype=np.int64, offset=HEAD_BYTES)
        self._shape = words[:_SHAPE_WORDS]
        self.words = words[_SHAPE_WORDS:]
        """The header's int64 words for the user of the slots; all 0 in a new segment."""
        self._slots: list[np.ndarray] = []
        self._mapped_shape = (0, 0)

    @staticmethod
    def create_anonymous(name: str = "headrace") -> "Segment":
        """A segment that this process owns itself, for processes without a supervisor."""
        fd = create_memory(name)
        return Segment(fd, path_of(fd, os.getpid(), fd))

    @staticmethod
    def inherited(variable: str = SEGMENT_FD) -> "Segment":
        """The segment that the supervisor passed in the environment; without one, a segment that this process owns."""
        if (number := os.environ.get(variable)) is None:
            return Segment.create_anonymous()
        fd = os.dup(int(number))
        return Segment(fd, path_of(fd, os.getppid(), int(number)))

    @staticmethod
    def open(path: str) -> "Segment":
        """Another process's segment; raises `PeerGone` when its owner is gone."""
        return Segment(open_memory(path), path)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot; 0 before `allocate`."""
        return int(self._shape[0])

    @property
    def num_slots(self) -> int:
        """Number of slots; 0 before `allocate`."""
        return int(self._shape[1])

    @property
    def held_bytes(self) -> int:
        """Bytes of the host's memory that the segment takes."""
        return 512 * os.fstat(self._fd).st_blocks

    def allocate(self, num_slots: int, slot_bytes: int) -> None:
        """Give the segment its slots, or more of them."""
        assert self.slot_bytes in (0, slot_bytes), (
            f"a segment with slots of {self.slot_bytes} bytes cannot change its shape"
        )
        os.ftruncate(self._fd, HEADER_BYTES + num_slots * _round_up(slot_bytes))
        self._shape[1] = num_slots
        self._shape[0] = slot_bytes

    def slot(self, index: int) -> np.ndarray:
        """The bytes of a slot, uint8 [slot_bytes], with all pages mapped, so that no copy waits for the kernel."""
        with self._lock:
            if self._mapped_shape != (self.num_slots, self.slot_bytes):
                self._map()
            return self._slots[index]

    def free(self) -> None:
        """Give the host the memory of all slots back; views of them have zeros. Raises `OSError` if the kernel refuses."""
        self._slots = []  # what is pinned stays in memory
        self._mapped_shape = (0, 0)
        punch = ctypes.CDLL(None, use_errno=True).fallocate
        num_bytes = os.fstat(self._fd).st_size - HEADER_BYTES
        mode = _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE
        if num_bytes and punch(self._fd, mode, ctypes.c_int64(HEADER_BYTES), ctypes.c_int64(num_bytes)):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    def try_lock(self, slot: int, lock: Lock) -> bool:
        """Lock a slot; False if a lock of another opening of the segment conflicts."""
        with self._lock:
            if lock is Lock.SHARED and self._shared_locks[slot]:
                self._shared_locks[slot] += 1
                return True
            if not self._set_lock(slot, lock):
                return False
            self._shared_locks[slot] += lock is Lock.SHARED
            return True

    def unlock(self, slot: int, lock: Lock) -> None:
        """Undo one `try_lock`."""
        with self._lock:
            if lock is Lock.SHARED:
                self._shared_locks[slot] -= 1
                if self._shared_locks[slot]:
                    return
            self._set_lock(slot, Lock.NONE)

    def close(self) -> None:
        """Close this opening; views of its slots stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            # A mapping holds a descriptor of its own, and a view holds the mapping.
            self._slots = []
            self._mapped_shape = (0, 0)
            self._shape = self._shape.copy()
            self.words = self.words.copy()

    def _map(self) -> None:
        num_slots, num_bytes = self.num_slots, self.slot_bytes  # the owner may add slots meanwhile
        stride = _round_up(num_bytes)
        memory = mmap.mmap(self._fd, HEADER_BYTES + num_slots * stride, flags=mmap.MAP_SHARED)
        _populate(np.frombuffer(memory, dtype=np.uint8))
        whole = np.frombuffer(memory, dtype=np.uint8, offset=HEADER_BYTES)
        self._slots = [whole[i * stride : i * stride + num_bytes] for i in range(num_slots)]
        self._mapped_shape = (num_slots, num_bytes)

    def _set_lock(self, slot: int, lock: Lock) -> bool:
        # Locks of the open file description, since locks of the process do not distinguish two openings within it.
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", lock.value, os.SEEK_SET, slot, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True


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


def _populate(memory: np.ndarray) -> None:
    """Map all pages of a mapping of shared memory. Pages may be larger than the header, so it is populated from its start.

    Python holds all other threads while it maps with MAP_POPULATE: for 1.4 s where 1.6 GB are new. Kernels before 5.14 know no other way, so
    there each page is read.
    """
    advise = ctypes.CDLL(None).madvise
    if advise(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), _MADV_POPULATE_WRITE):
        memory[::_PAGE].max()


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


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
