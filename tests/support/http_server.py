"""A server on a free port that answers requests as a test says, and keeps what it was asked."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]
"""Status, body (bytes as they are, else as JSON) and headers."""


@dataclass
class Served:
    """The requests to a server, in order."""

    url: str = ""
    paths: list[str] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def serving(answer: Callable[[int, Any], Answer]) -> Iterator[Served]:
    """Serve until the body ends; `answer` gets the number of the request, from 0, and its JSON, None of a GET."""
    served = Served()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            with lock:
                number = len(served.bodies)
                served.paths.append(self.path)
                served.bodies.append(body)
                served.headers.append(dict(self.headers))
            status, content, *rest = answer(number, body)
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in (rest[0] if rest else {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def chat(text: str | None) -> Any:
    """A chat completion with this text."""
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}
