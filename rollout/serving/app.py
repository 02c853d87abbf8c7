"""The routes: keys, the limits of a body, errors in OpenAI's form, and clients that leave."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .access import Access
from .fields import RequestRefused
from .front import Front, Reader, Work

log = logging.getLogger(__name__)

MOST_BYTES = 8 << 20
"""Most bytes of a request's body."""
DRAINED_BYTES = 256 << 20
"""Bytes of a body that is too large which are read all the same: a client that still sends does not read an answer."""
BODY_S = 60.0
"""Longest time in which a body arrives."""
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class ClientGone(Exception):
    """The client has closed its connection, so nobody waits for the answer."""


def make_app(front: Front, access: Access, more: Sequence[Route] = ()) -> Starlette:
    """The application of a front. more: routes beside those of the API, each of them `guarded`."""

    def route(path: str, handler: Handler, method: str) -> Route:
        return Route(path, guarded(handler, lambda request: access.check(request.headers)), methods=[method])

    async def models(_: Request) -> Response:
        return json_answer({"object": "list", "data": [card(front)]})

    async def model(request: Request) -> Response:
        if request.path_params["name"] != front.model.name:
            problem = f"there is no model {request.path_params['name']!r} here; this server has {front.model.name!r}"
            raise RequestRefused(problem, "model", status=404, code="model_not_found")
        return json_answer(card(front))

    async def health(_: Request) -> Response:
        return json_answer({"status": "ok"})

    def posted(reader: Reader) -> Handler:
        async def answer(request: Request) -> Response:
            return await _answer(front, request, reader(await read_json(request)))

        return answer

    routes = [
        Route("/health", health),
        route("/v1/models", models, "GET"),
        route("/v1/models/{name:path}", model, "GET"),
        route("/v1/chat/completions", posted(front.chat), "POST"),
        route("/v1/completions", posted(front.text), "POST"),
        route("/inference/v1/generate", posted(front.ids), "POST"),
        *more,
    ]
    paths = [f"{_method(each)} {each.path.replace(':path', '')}" for each in routes[1:]]

    async def not_found(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        problem = f"{request.method} {request.url.path} is not a route of this server; there are {', '.join(paths)}"
        return refused(RequestRefused(problem, status=error.status_code, code="unknown_route"))

    return Starlette(routes=routes, exception_handlers={404: not_found, 405: not_found})


class EventStream(Response):
    """Server-sent events, until they end or the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        """end: called once, when nothing more is sent."""
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone):
                await unless_gone(receive, self._send(send))
        finally:
            self._end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves. Raises `ClientGone` then."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    worker = asyncio.ensure_future(work)
    leaver = asyncio.ensure_future(leave())
    try:
        await asyncio.wait((worker, leaver), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGone
        return await worker
    finally:
        worker.cancel()
        leaver.cancel()
        await asyncio.gather(worker, leaver, return_exceptions=True)


def guarded(handler: Handler, check: Callable[[Request], None]) -> Handler:
    """The handler, for those whom `check` does not refuse, with its errors as answers."""

    async def answer(request: Request) -> Response:
        try:
            check(request)
            return await handler(request)
        except RequestRefused as error:
            return refused(error)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        except Exception:
            log.exception("a request to %s failed", request.url.path)
            return refused(RequestRefused.internal())

    return answer


async def _answer(front: Front, request: Request, work: Work) -> Response:
    front.desk.submit(work.ticket)
    if work.answer.form.streams:
        return EventStream(front.events(work), lambda: front.desk.release(work.ticket))
    try:
        return json_answer(await unless_gone(request.receive, front.whole(work)))
    finally:
        front.desk.release(work.ticket)


async def read_json(request: Request) -> dict[str, Any]:
    """The body. Raises `RequestRefused`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        problem = f"the header Content-Type must be application/json, not {kind or 'missing'}"
        raise RequestRefused(problem, status=415, code="wrong_content_type")
    try:
        value = msgspec.json.decode(await read_body(request))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {error}", code="not_json") from error
    if not isinstance(value, dict):
        raise RequestRefused("the body must be a JSON object", code="not_an_object")
    return value


async def read_body(request: Request) -> bytes:
    """The bytes of a body. Raises `RequestRefused` for one that is too large or too slow."""
    too_large = RequestRefused(f"the body has more than {MOST_BYTES} bytes", status=413, code="body_too_large")
    declared = request.headers.get("content-length", "0")
    if int(declared) > (MOST_BYTES if "expect" in request.headers else DRAINED_BYTES):
        raise too_large
    body = bytearray()
    num_read = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                num_read += len(chunk)
                if num_read <= MOST_BYTES:
                    body += chunk
                elif num_read > DRAINED_BYTES:
                    break
    except TimeoutError as error:
        raise RequestRefused(f"the body took longer than {BODY_S:g} s", status=408, code="slow_body") from error
    if num_read > MOST_BYTES:
        raise too_large
    return bytes(body)


def _method(route: Route) -> str:
    return next(iter(route.methods - {"HEAD"})) if route.methods else "GET"


def card(front: Front) -> dict[str, Any]:
    """What the list of models says of the served one."""
    return {
        "id": front.model.name,
        "object": "model",
        "created": 0,
        "owned_by": "headrace",
        "max_model_len": front.model.context,
        "weight_version": front.desk.version,
    }


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def refused(error: RequestRefused) -> Response:
    """The answer to a request that is refused."""
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        headers["Retry-After"] = "1"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (401, 403, 408, 413):
        headers["Connection"] = "close"  # the rest of the body is not read
    return json_answer(error.body(), error.status, headers)
