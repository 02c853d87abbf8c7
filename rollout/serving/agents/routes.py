"""The routes of agents: claim a sample, call the policy, end with a reward; see docs/use/agents.md."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..access import Access
from ..app import ClientGone, EventStream, card, guarded, json_answer, read_json, unless_gone
from ..fields import Fields, RequestRefused
from .office import AgentOffice, OpenConversation

ROOT = "/agents/v1/conversations"
RETRY_KEY = "idempotency-key"
"""The header with the client's name for a claim or a call: a second request of that name gets the answer to the first one."""
MOST_KEY = 200
"""Most characters of that name."""
_CALLS = {"/v1/chat/completions": "chat", "/v1/completions": "text", "/inference/v1/generate": "ids"}
Handler = Callable[[Request], Awaitable[Response]]


def agent_routes(office: AgentOffice, access: Access) -> list[Route]:
    """The routes. access: of the server; a conversation's own key opens its routes as well."""

    def check(request: Request) -> None:
        number = request.path_params.get("id", "")
        if not office.is_key_of(number, request.headers.get("authorization", "")):
            access.check(request.headers)

    def route(path: str, handler: Handler, method: str) -> Route:
        return Route(path, guarded(handler, check), methods=[method])

    one = f"{ROOT}/{{id}}"
    return [
        route(ROOT, _claim(office), "POST"),
        route(one, _state(office), "GET"),
        route(f"{one}/end", _end(office), "POST"),
        route(f"{one}/v1/models", _models(office), "GET"),
        *(route(f"{one}{path}", _call(office, kind), "POST") for path, kind in _CALLS.items()),
    ]


def _claim(office: AgentOffice) -> Handler:
    async def claim(request: Request) -> Response:
        has_body = "content-type" in request.headers or request.headers.get("content-length", "0") != "0"
        fields = Fields(await read_json(request) if has_body else {})
        for label in ("user", "metadata"):
            fields.any(label)
        fields.finish()
        key = _retry_key(request)
        claimed: list[OpenConversation] = []

        async def take() -> OpenConversation:
            claimed.append(await office.claim(key))
            return claimed[0]

        try:
            found = await unless_gone(request.receive, take())
        except ClientGone:
            if claimed and not key:
                office.abandon(claimed[0])
            raise
        return json_answer(_claimed(request, office, found))

    return claim


def _claimed(request: Request, office: AgentOffice, found: OpenConversation) -> dict[str, Any]:
    url = f"{str(request.base_url).rstrip('/')}{ROOT}/{found.id}"
    return office.state(found) | {
        "url": url,
        "base_url": f"{url}/v1",
        "api_key": found.key,
        "model": found.front.model.name,
        "row": found.held.row,
    }


def _state(office: AgentOffice) -> Handler:
    async def state(request: Request) -> Response:
        return json_answer(office.state(office.find(request.path_params["id"])))

    return state


def _end(office: AgentOffice) -> Handler:
    async def end(request: Request) -> Response:
        return json_answer(office.end(office.find(request.path_params["id"]), await read_json(request)))

    return end


def _models(office: AgentOffice) -> Handler:
    async def models(request: Request) -> Response:
        front = office.find(request.path_params["id"]).front
        return json_answer({"object": "list", "data": [card(front)]})

    return models


def _call(office: AgentOffice, kind: str) -> Handler:
    async def call(request: Request) -> Response:
        found = office.find(request.path_params["id"])
        body = await read_json(request)
        office.check_open(found)
        key = _retry_key(request)
        if body.get("stream") is True:
            if key:
                problem = "a stream cannot be repeated; leave the header out, or set stream=false"
                raise RequestRefused(problem, "Idempotency-Key")
            work = office.begin(found, kind, body)
            return EventStream(found.front.events(work), lambda: office.end_stream(found, work))
        return json_answer(await unless_gone(request.receive, office.answer(found, kind, body, key)))

    return call


def _retry_key(request: Request) -> str:
    key = request.headers.get(RETRY_KEY, "")
    if len(key) > MOST_KEY:
        raise RequestRefused(f"has more than {MOST_KEY} characters", "Idempotency-Key")
    return key
