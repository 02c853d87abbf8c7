"""A front on a generator, and a plain client for it."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.routing import Route
from support.closing import at_end

from headrace.comm.recipe import DataSettings
from headrace.rollout.engine.sequence import Completion, SequenceProgress, SequenceState
from headrace.rollout.serving.access import Access
from headrace.rollout.serving.app import make_app
from headrace.rollout.serving.desk import Desk, ServedGenerator
from headrace.rollout.serving.front import Front, ServedModel
from headrace.rollout.serving.server import HttpThread, listen

TEMPLATE = (
    "{% if tools %}[{{ tools | tojson }}]\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}: {{ c.function.arguments | tojson }}){% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template that shows tools."""
CHAT = DataSettings(chat_template=TEMPLATE)
TOOL = {"type": "function", "function": {"name": "calc", "description": "adds", "parameters": {"type": "object"}}}
PATIENCE_S = 60.0


@dataclass
class ScriptedGenerator:
    """Answers prompts with given tokens, one for each step, or as many as are asked for of token 4 where it has none."""

    script: Sequence[int] = ()
    logprob: float = -0.5
    text_of: Callable[[list[int]], str] = str
    reason: str = "stop"
    """Why a scripted response ends."""
    live: dict[int, SequenceState] = field(default_factory=dict)
    may_step: threading.Event = field(default_factory=threading.Event)
    """Cleared, it makes no progress."""
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.may_step.set()

    @property
    def idle(self) -> bool:
        return not self.live

    def step(self) -> list[Completion]:
        if not self.may_step.wait(0.002):
            return []
        self.num_steps += 1
        return [done for state in list(self.live.values()) if (done := self._advance(state))]

    def unfinished(self) -> list[SequenceProgress]:
        return [SequenceProgress(s.trajectory_id, len(s.prompt_ids) + len(s.token_ids)) for s in self.live.values()]

    def responses(self) -> list[SequenceState]:
        return [*self.live.values()]

    def import_sequences(self, states: Sequence[SequenceState]) -> None:
        self.live |= {state.trajectory_id: state for state in states}

    def export_sequences(self, trajectory_ids: Sequence[int], with_cache: bool = False) -> list[SequenceState]:
        return [self.live.pop(number) for number in trajectory_ids]

    def _advance(self, state: SequenceState) -> Completion | None:
        tokens = state.token_ids
        tokens.append(self.script[len(tokens)] if self.script else 4)
        state.logprobs.append(self.logprob)
        if len(tokens) < (len(self.script) or state.params.max_new_tokens):
            return None
        del self.live[state.trajectory_id]
        reason = self.reason if self.script else "length"
        return Completion(state.trajectory_id, state.prompt_ids, tokens, state.logprobs, reason, self.text_of(tokens))


@dataclass
class Reply:
    """An answer to a plain client."""

    status: int
    body: Any
    headers: dict[str, str]


@dataclass
class Served:
    """A running front."""

    port: int
    desk: Desk
    generator: Any
    thread: HttpThread
    key: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def ask(self, path: str, body: Any = None, method: str = "", **headers: str) -> Reply:
        """One request; `body` is sent as JSON."""
        with self.asked(path, body, method, **headers) as answer:
            raw = answer.read()
            parsed = json.loads(raw) if answer.headers["content-type"] == "application/json" else raw
            return Reply(answer.status, parsed, {name.lower(): value for name, value in answer.headers.items()})

    @contextmanager
    def asked(
        self, path: str, body: Any = None, method: str = "", **headers: str
    ) -> Iterator[http.client.HTTPResponse]:
        """One request whose answer the caller reads."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        given = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, raw, given)
            yield connection.getresponse()
        finally:
            connection.close()

    def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream, without the last line, which must be `[DONE]`."""
        with self.asked(path, {**body, "stream": True}) as answer:
            assert answer.status == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = answer.read().decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def connect(self) -> socket.socket:
        """A connection that says nothing."""
        opened = socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)
        at_end(opened.close)
        return opened

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait for something that the server does soon."""
        end = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.005)


def serve(
    generator: ServedGenerator,
    tokenizer: Any,
    *,
    context: int = 256,
    vocab_size: int = 128,
    keys: Sequence[str] = (),
    most_samples: int = 256,
    timeout_s: float = PATIENCE_S,
    data: DataSettings = CHAT,
    version: int = 7,
    send_buffer: int = 0,
    digest: str = "",
    receipt_key: bytes = b"",
    more: Callable[[Front, Access], Sequence[Route]] = lambda front, access: (),
) -> Served:
    """A front on a generator, until the end of the test. The generator works in a thread of its own.

    more: routes beside those of the API. send_buffer: bytes that the kernel keeps for a client that does not read; 0 for its default.
    """
    desk = Desk(most_samples, version, digest)
    model = ServedModel("policy", context, vocab_size, tokenizer, data)
    opened = listen("127.0.0.1", 0)
    if send_buffer:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    front = Front(model, desk, timeout_s, receipt_key)
    access = Access("127.0.0.1", keys)
    http_thread = HttpThread(make_app(front, access, more(front, access)), opened)
    is_ended = threading.Event()

    def work() -> None:
        while not is_ended.is_set():
            desk.turn(generator, 0.05)

    worker = threading.Thread(target=work, name="generator", daemon=True)

    def close() -> None:
        http_thread.close()
        is_ended.set()
        worker.join(PATIENCE_S)

    at_end(close)
    http_thread.start()
    worker.start()
    return Served(http_thread.port, desk, generator, http_thread, keys[0] if keys else "")
