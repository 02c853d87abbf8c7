"""Results that clients fetch later: a request is answered at once with an id, and its result is asked for by that id.

A request that comes a second time, because its answer was lost, gets the id of the first: it is known by its key, which names the
model or the sampler and the request's number there.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ....rollout.serving.fields import RequestRefused
from .kept import KeptResult

KEPT_RESULTS = 10_000
KEPT_BYTES = 256 << 20
"""Results that are kept for clients that ask again: the newest, by number and by size."""
JSON = "application/json"
PROTOBUF = "application/x-protobuf"


@dataclass(slots=True, eq=False)
class Future:
    """A request whose result comes later. It belongs to the thread of the event loop, but for the methods that finish it."""

    request_id: str
    digest: bytes
    """Of the request's body."""
    first_answer: dict[str, Any]
    """The answer to the request itself."""
    cancel: Callable[[], None] = lambda: None
    media_type: str = JSON
    body: bytes | None = None
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _is_done: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _on_done: Callable[["Future"], None] = lambda _: None

    def succeed(self, value: Any) -> None:
        """Finish with JSON, or with the bytes of a protocol-buffer message; in any thread."""
        self.finish(*encoded(value))

    def fail(self, problem: str, *, is_user: bool) -> None:
        """Finish with an error, for which the client is responsible or the server; in any thread."""
        self.finish(*encoded_error(problem, is_user=is_user))

    async def wait(self, timeout_s: float) -> bool:
        """Whether it is finished within this time."""
        done, _ = await asyncio.wait((self._is_done,), timeout=timeout_s)
        return bool(done)

    def finish(self, media_type: str, body: bytes) -> None:
        """Finish with what the client gets; in any thread. The first result stays."""

        def finish() -> None:
            if self.body is None:
                self.media_type = media_type
                self.body = body
                self._is_done.set_result(None)
                self._on_done(self)

        self._loop.call_soon_threadsafe(finish)


class Futures:
    """All requests whose results are not forgotten; belongs to the thread of the event loop."""

    def __init__(self, recall: Callable[[str], KeptResult | None] = lambda _: None) -> None:
        """recall: finds the result on the disk of a request that is not known here."""
        self._recall = recall
        self._all: dict[str, Future] = {}
        self._finished: OrderedDict[str, int] = OrderedDict()
        """Sizes of the results, in the order in which they came."""
        self._num_bytes = 0

    def open(self, request_id: str, digest: bytes, **answer: Any) -> tuple[Future, bool]:
        """The request of this id, and whether it is new. Raises `RequestRefused` for another request with the id of an earlier one."""
        known = self._known(request_id)
        if known is not None:
            if known.digest != digest:
                problem = f"{request_id} was another request; a number names one request of a client"
                raise RequestRefused(problem, "seq_id", code="seq_id_taken")
            return known, False
        return self._new(request_id, digest, **answer), True

    def has(self, request_id: str) -> bool:
        """Whether a request of this id has come."""
        return request_id in self._all

    def find(self, request_id: str) -> Future:
        """The request of an id. Raises `RequestRefused` for one that is not known, or not any more."""
        future = self._known(request_id)
        if future is None:
            problem = f"there is no request {request_id!r}: this server was started anew, or has forgotten its result"
            raise RequestRefused(problem, "request_id", status=404, code="unknown_request")
        return future

    def forget(self, request_id: str) -> None:
        """Forget a request that was not taken: it may come again."""
        self._all.pop(request_id, None)

    def _known(self, request_id: str) -> Future | None:
        """A request, also one of which the disk alone knows; its own answer is that of a request to a model then."""
        future = self._all.get(request_id)
        if future is None and (kept := self._recall(request_id)) is not None:
            future = self._new(request_id, kept.digest, model_id=request_id.rpartition(":")[0])
            future.finish(kept.media_type, kept.body)
        return future

    def _new(self, request_id: str, digest: bytes, **answer: Any) -> Future:
        future = Future(request_id, digest, {"request_id": request_id, **answer})
        future._on_done = self._keep
        self._all[request_id] = future
        return future

    def _keep(self, future: Future) -> None:
        size = len(future.body or b"")
        self._finished[future.request_id] = size
        self._num_bytes += size
        while len(self._finished) > 1 and (len(self._finished) > KEPT_RESULTS or self._num_bytes > KEPT_BYTES):
            oldest, size = self._finished.popitem(last=False)
            self._num_bytes -= size
            del self._all[oldest]


def encoded(value: Any) -> tuple[str, bytes]:
    """The type and the body of a result: JSON, or the bytes of a protocol-buffer message."""
    return (PROTOBUF, value) if isinstance(value, bytes) else (JSON, msgspec.json.encode(value))


def encoded_error(problem: str, *, is_user: bool) -> tuple[str, bytes]:
    """The type and the body of an error, for which the client is responsible or the server."""
    return JSON, msgspec.json.encode({"error": problem, "category": "user" if is_user else "server"})
