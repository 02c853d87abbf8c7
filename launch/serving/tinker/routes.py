"""The routes of the API below `/api/v1`, as SDK 0.38 asks them."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....rollout.serving.access import Access
from ....rollout.serving.app import guarded, json_answer, read_body, refused, unless_gone
from ....rollout.serving.fields import Fields, RequestRefused
from .catalog import Catalog
from .futures import PROTOBUF
from .requests import required

if TYPE_CHECKING:
    from .service import TinkerService

PREFIX = "/api/v1"
POLL_S = 25.0
"""Longest time for which an answer to `retrieve_future` waits; the SDK's own limit is 45 s."""
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "use_pyqwest_transport": False,
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_bytes_count": 4_000_000,
    "sample_max_concurrent_requests": 200,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
}
"""What the SDK shall do: send keys as they are, bodies below the limit of this server, no more polls than it has connections for."""
DYNAMIC_CONFIG = {"sample_cancel_enabled": True}
KINDS = ("optim_step", "save_weights", "load_weights", "save_weights_for_sampler", "save_weights_external")
"""Requests to a model in JSON, each with a number."""
Json = Mapping[str, Any]
Answer = Callable[[Request], Awaitable[Response]]


class KeyAccess(Access):
    """Access by the SDK's header `X-API-Key`, or as for the other servers."""

    def check(self, headers: Mapping[str, str]) -> None:
        key = headers.get("x-api-key")
        super().check({**headers, "authorization": f"Bearer {key}"} if key else headers)


def make_tinker_app(service: "TinkerService", catalog: Catalog, access: Access) -> Starlette:
    """The application of a service."""
    facts = service.facts
    model = {
        "model_name": facts.name,
        "max_context_length": facts.context,
        "trainable": True,
        "sampleable": True,
    }
    posts: dict[str, Answer] = {
        "client/config": _fixed(CLIENT_CONFIG),
        "client/dynamic_config": _fixed(DYNAMIC_CONFIG),
        "telemetry": _fixed({"status": "accepted"}),
        "create_session": _json(service.create_session),
        "session_heartbeat": _json(service.heartbeat),
        "sessions/{session_id}/finish": _finish(service),
        "create_model": _kept(service.create_model),
        "get_info": _json(service.get_info),
        "forward_backward": _protobuf(service.forward_backward),
        **{kind: _kept(partial(service.of_model, kind)) for kind in KINDS},
        "create_sampling_session": _json(service.create_sampling_session),
        "asample": _json_and_raw(service.asample),
        "retrieve_future": _retrieve(service),
        "cancel_future": _json(lambda body: service.cancel(body) or {}),
        "weights_info": _json(lambda body: catalog.weights_info(required(Fields(body), "tinker_path", str))),
    }
    gets: dict[str, Answer] = {
        "healthz": _fixed({"status": "ok"}),
        "get_server_capabilities": _fixed({"supported_models": [model]}),
        "training_runs": _get(lambda request: catalog.runs(request.query_params)),
        "training_runs/{run_id}": _get(lambda request: catalog.run(request.path_params["run_id"])),
        "training_runs/{run_id}/checkpoints": _get(lambda request: catalog.checkpoints(request.path_params["run_id"])),
        "checkpoints": _get(lambda request: catalog.all_checkpoints(request.query_params)),
        "samplers/{sampler_id}": _get(lambda request: _sampler(service, request.path_params["sampler_id"])),
        "sessions": _get(lambda request: {"sessions": service.sessions.ids()}),
        "sessions/{session_id}": _get(lambda request: _session(service, request.path_params["session_id"])),
        "sequences/{sequence_id}/versions": _get(lambda request: service.versions(request.path_params["sequence_id"])),
    }
    deletes: dict[str, Answer] = {
        "training_runs/{run_id}/checkpoints/{kind}/{name}": _get(lambda request: catalog.remove(**request.path_params)),
    }
    routes = [
        Route(f"{PREFIX}/{path}", guarded(answer, lambda request: access.check(request.headers)), methods=[method])
        for method, table in (("POST", posts), ("GET", gets), ("DELETE", deletes))
        for path, answer in table.items()
    ]

    async def not_found(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        problem = f"{request.method} {request.url.path} is not supported by this server"
        return refused(RequestRefused(problem, status=404, code="unknown_route"))

    return Starlette(routes=routes, exception_handlers={404: not_found, 405: not_found})


def _fixed(value: Any) -> Answer:
    async def answer(request: Request) -> Response:
        await read_body(request)
        return json_answer(value)

    return answer


def _get(find: Callable[[Request], Json]) -> Answer:
    async def answer(request: Request) -> Response:
        return json_answer(find(request))

    return answer


def _json(perform: Callable[[Json], Json]) -> Answer:
    async def answer(request: Request) -> Response:
        return json_answer(perform(_parsed(await read_body(request))))

    return answer


def _json_and_raw(perform: Callable[[Json, bytes], Json]) -> Answer:
    async def answer(request: Request) -> Response:
        raw = await read_body(request)
        return json_answer(perform(_parsed(raw), raw))

    return answer


def _kept(perform: Callable[[Json, bytes], Awaitable[Json]]) -> Answer:
    async def answer(request: Request) -> Response:
        raw = await read_body(request)
        return json_answer(await perform(_parsed(raw), raw))

    return answer


def _protobuf(perform: Callable[[bytes], Awaitable[Json]]) -> Answer:
    async def answer(request: Request) -> Response:
        kind = request.headers.get("content-type", "")
        coding = request.headers.get("content-encoding", "identity")
        if kind != PROTOBUF or coding != "identity":
            problem = f"forward_backward must be {PROTOBUF} without an encoding, not {kind or 'nothing'} with {coding}"
            raise RequestRefused(problem, status=415, code="wrong_content_type")
        return json_answer(await perform(await read_body(request)))

    return answer


def _finish(service: "TinkerService") -> Answer:
    async def answer(request: Request) -> Response:
        await read_body(request)
        service.finish(request.path_params["session_id"])
        return json_answer({})

    return answer


def _retrieve(service: "TinkerService") -> Answer:
    async def answer(request: Request) -> Response:
        fields = Fields(_parsed(await read_body(request)))
        future = service.future(required(fields, "request_id", str))
        await unless_gone(request.receive, future.wait(POLL_S))
        if future.body is None:
            return json_answer({"type": "try_again", "request_id": future.request_id, "queue_state": "active"})
        service.fetched(future.request_id)
        return Response(future.body, media_type=future.media_type)

    return answer


def _sampler(service: "TinkerService", sampler_id: str) -> Json:
    _, path = service.sessions.sampler(sampler_id)
    return {"sampler_id": sampler_id, "base_model": service.facts.name, "model_path": path}


def _session(service: "TinkerService", session_id: str) -> Json:
    session = service.sessions.find(session_id)
    return {
        "training_run_ids": session.model_ids,
        "sampler_ids": [*session.samplers],
        "user_metadata": session.user_metadata,
        "display_name": session.display_name,
    }


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {error}", code="not_json") from error
    if not isinstance(value, dict):
        raise RequestRefused("the body must be a JSON object", code="not_an_object")
    return value
