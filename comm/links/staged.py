"""Links through staging buffers: data is copied into a bucket on this end's device, broadcast to the other end's bucket, and copied out there.

Over NCCL the buckets are on two different GPUs (NCCL before 2.30 refuses two ranks on one). Over Gloo they are in host memory:
the same steps, for tests without a GPU. While one bucket travels the other is filled or emptied. Small buffers (headers,
answers) take the control link, a socket: a broadcast that waits for its other end keeps a GPU busy, and the socket is the
first to report a dead neighbour.
"""

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..errors import LinkBroken

if TYPE_CHECKING:
    from .tcp import TcpLink

BUCKET_BYTES = 8 << 20
_SMALL_BYTES = 64 << 10
_POLL_S = 5e-5
_CONNECT_POLL_S = 0.01
_LAST_BYTES_S = 1.0
"""Seconds to wait for the last bytes of an end that has closed."""


def stream_of_link(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A context in which copies and broadcasts go to a stream of the link's own.

    A thread's default stream is that of training: each bucket would wait there for all kernels that are launched.
    """
    return partial(torch.cuda.stream, torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext


class StagedLink:
    """One end, with two buckets of `BUCKET_BYTES` on `device`; `control_link` carries small buffers."""

    def __init__(
        self, backend: str, group: ProcessGroup, end: int, device: torch.device, control_link: "TcpLink"
    ) -> None:
        self.backend = backend
        self._control_link = control_link
        self._group: ProcessGroup | None = group
        self._end = end
        self._stream = stream_of_link(device)
        self._buckets = [torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]

    def connect(self, deadline_s: float) -> None:
        """Broadcast one byte, for which NCCL connects the two GPUs. That can take a minute, so it has a deadline of its own.

        Both ends call it. NCCL waits for the other end without a deadline, in a thread that is left behind if it has none.
        """
        until = time.monotonic() + deadline_s
        errors = list[Exception]()

        def broadcast() -> None:
            try:
                with self._stream():
                    self._finish(self._broadcast(self._buckets[0][:1], 0, until), until)
            except LinkBroken as error:
                errors.append(error)

        thread = threading.Thread(target=broadcast, name="connects a link", daemon=True)
        thread.start()
        while thread.is_alive() and time.monotonic() < until and not self._control_link.is_closed():
            thread.join(_CONNECT_POLL_S)
        thread.join(_LAST_BYTES_S)
        if thread.is_alive():
            self._group = None  # to abort it would wait for its start
            self.close()
            raise LinkBroken("broadcast: the other end did not connect its GPU")
        if errors:
            raise errors[0]

    def send(self, buffer: np.ndarray, deadline_s: float) -> None:
        """Send all bytes. From pinned memory a GPU copies while it sends."""
        if buffer.nbytes <= _SMALL_BYTES:
            self._control_link.send(buffer, deadline_s)
            return
        with self._stream():
            self._send_by_buckets(buffer, time.monotonic() + deadline_s)

    def receive(self, buffer: np.ndarray, deadline_s: float) -> None:
        if buffer.nbytes <= _SMALL_BYTES:
            self._control_link.receive(buffer, deadline_s)
            return
        with self._stream():
            self._receive_by_buckets(buffer, time.monotonic() + deadline_s)

    def close(self) -> None:
        """End the control link and the group, with the broadcasts under way."""
        self._control_link.close()
        group = self._group
        self._group = None
        if group is not None and self.backend == "nccl":
            group.abort()

    def _send_by_buckets(self, buffer: np.ndarray, until: float) -> None:
        under_way: dict[int, dist.Work] = {}
        for piece, bucket in self._pairs(buffer):
            if id(bucket) in under_way:
                self._finish(under_way[id(bucket)], until)
            filled = bucket[: piece.numel()].copy_(piece, non_blocking=True)
            under_way[id(bucket)] = self._broadcast(filled, self._end, until)
        for work in under_way.values():
            self._finish(work, until)

    def _receive_by_buckets(self, buffer: np.ndarray, until: float) -> None:
        pairs = self._pairs(buffer)
        coming = [self._broadcast(bucket[: piece.numel()], 1 - self._end, until) for piece, bucket in pairs[:1]]
        for (piece, bucket), following in itertools.zip_longest(pairs, pairs[1:]):
            work = coming.pop()
            if following is not None:
                coming.append(self._broadcast(following[1][: following[0].numel()], 1 - self._end, until))
            self._finish(work, until)
            piece.copy_(bucket[: piece.numel()], non_blocking=True)
        if self._buckets[0].is_cuda:
            torch.cuda.current_stream(self._buckets[0].device).synchronize()  # the last bytes are still on their way

    def _pairs(self, buffer: np.ndarray) -> list[tuple[torch.Tensor, torch.Tensor]]:
        # torch would warn of read-only memory.
        tensor = torch.from_numpy(buffer if buffer.flags.writeable else buffer.copy())
        return list(zip(torch.split(tensor, BUCKET_BYTES), itertools.cycle(self._buckets), strict=False))

    def _broadcast(self, bucket: torch.Tensor, root: int, until: float) -> dist.Work:
        if self._group is None:
            raise LinkBroken("the link is closed")
        options = dist.BroadcastOptions()
        options.rootRank = root
        if self.backend != "nccl":
            options.timeout = timedelta(seconds=max(until - time.monotonic(), 1e-3))
        try:
            return self._group.broadcast([bucket], options)
        except RuntimeError as error:
            self.close()
            raise LinkBroken(f"broadcast: {error}") from error

    def _finish(self, work: dist.Work, until: float) -> None:
        """Wait for a broadcast, and have this thread's stream wait for it."""
        try:
            if self.backend == "nccl":
                self._poll(work, until)
            work.wait(timedelta(seconds=max(until - time.monotonic(), 1e-3)))
        except (RuntimeError, LinkBroken) as error:
            self.close()
            raise LinkBroken(f"broadcast: {error}") from error

    def _poll(self, work: dist.Work, until: float) -> None:
        """Wait for a broadcast: NCCL's own `wait` returns at once, and its kernels never end if the other end dies."""
        reason = "the other end did nothing before the deadline"
        while not work.is_completed():
            now = time.monotonic()
            if now > until:
                raise LinkBroken(reason)
            if now + _LAST_BYTES_S < until and self._control_link.is_closed():
                until = now + _LAST_BYTES_S
                reason = "closed by the other end"
            time.sleep(_POLL_S)
