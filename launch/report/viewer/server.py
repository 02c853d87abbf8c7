"""The server of the page: fixed addresses below a random key, on loopback."""

import base64
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from ....comm.errors import SettingError
from ....trainer.record.samples_file import SAMPLES_FILE
from ...config.run_folder import METRICS_FILE
from .sample_index import COLUMNS, Gone, SampleIndex, open_regular

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost", "[::1]")
"""The names under which a browser asks for it, on any port: one may be forwarded. Another one is of a page elsewhere that has made its
own name mean this machine (DNS rebinding)."""
_PAGE = Path(__file__).with_name("page.html")
_MOST_BYTES = 1 << 22
"""Bytes of `metrics.jsonl` in one answer."""
_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


class ViewerServer(ThreadingHTTPServer):
    """Serves one run folder."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.samples = SampleIndex(folder / SAMPLES_FILE)
        self.key = secrets.token_urlsafe(16)
        """Part of each address: other users of the machine can reach the port too."""
        name = escape(str(folder)).encode(errors="replace")
        self.page = (
            _PAGE.read_bytes().replace(b"{{COLUMNS}}", ",".join(COLUMNS).encode(), 1).replace(b"{{RUN}}", name, 1)
        )
        self.policy = _policy(self.page)
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        """The page's."""
        return f"http://{HOST}:{self.server_port}/{self.key}/"

    def server_close(self) -> None:
        super().server_close()
        self.samples.close()


def open_server(folder: Path, port: int) -> ViewerServer:
    """A server that has read the run so far. port: 0 takes a free one. Raises `SettingError` for one that is taken."""
    try:
        server = ViewerServer(folder, port)
    except OSError as error:
        raise SettingError(f"--port={port}: {error.strerror}") from error
    server.samples.rows(0, 0)
    return server


class _Handler(BaseHTTPRequestHandler):
    server: ViewerServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """Answer one of the addresses; nothing in a request names a file."""
        name = (self.headers.get("Host") or "").rsplit(":", 1)[0] if not self._is_bare else self.headers.get("Host")
        try:
            parts = urlsplit(self.path)
        except ValueError:  # such as a bracket that is not closed in the place of a host
            self._answer(HTTPStatus.BAD_REQUEST, b"not an address", "text/plain")
            return
        key, _, rest = parts.path.removeprefix("/").partition("/")
        if name not in _NAMES or not hmac.compare_digest(key.encode(), self.server.key.encode()):
            self._answer(
                HTTPStatus.FORBIDDEN, b"the address of the page is on the console of `headrace view`", "text/plain"
            )
            return
        given = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        answers: dict[str, Callable[[dict[str, str]], bytes]] = {
            "rows": self._rows, "sample": self._sample, "search": self._search, "metrics": self._metrics,
        }  # fmt: skip
        if rest == "":
            self._answer(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
        elif rest in answers:
            try:
                self._answer(HTTPStatus.OK, answers[rest](given), "application/json")
            except Gone:
                self._answer(HTTPStatus.CONFLICT, b'"the file has changed"', "application/json")
            except (KeyError, ValueError):
                self._answer(HTTPStatus.BAD_REQUEST, b'"not understood"', "application/json")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"there is nothing here", "text/plain")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

    @property
    def _is_bare(self) -> bool:
        """Whether the name of the host has no port."""
        return re.search(r":\d+$", self.headers.get("Host") or "") is None

    def _rows(self, given: dict[str, str]) -> bytes:
        found = self.server.samples.rows(int(given.get("first", 0)), int(given.get("generation", 0)))
        head = f'{{"generation":{found.generation},"first":{found.first},"total":{found.total},"rows":['
        return head.encode() + b",".join(found.rows) + b"]}"

    def _sample(self, given: dict[str, str]) -> bytes:
        return self.server.samples.line(int(given["number"]), int(given["generation"]))

    def _search(self, given: dict[str, str]) -> bytes:
        return msgspec.json.encode(self.server.samples.search(given["words"], int(given["generation"])))

    def _metrics(self, given: dict[str, str]) -> bytes:
        """Lines from a byte of the file on; from its first byte if the file is shorter by now, or no line begins there."""
        start = int(given.get("first", 0))
        lines: list[Any] = []
        try:
            descriptor = open_regular(self.server.folder / METRICS_FILE)
        except OSError:  # there is none yet
            return msgspec.json.encode({"first": 0, "next": 0, "lines": lines})
        try:
            if start and os.pread(descriptor, 1, start - 1) != b"\n":
                start = 0
            block = os.pread(descriptor, _MOST_BYTES, start)
        finally:
            os.close(descriptor)
        end = start + block.rfind(b"\n") + 1
        for line in block[: end - start].splitlines():
            with suppress(ValueError):
                lines.append(json.loads(line))  # numbers that are not finite become null below
        return msgspec.json.encode({"first": start, "next": end, "lines": lines})

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", self.server.policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)


def _policy(page: bytes) -> str:
    """The rights of the page in a browser: to run its own script, and to ask this server."""
    digests = {"script": "", "style": ""}
    for kind, text in _INLINE.findall(page):
        digests[kind.decode()] += f" 'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
    return (
        f"default-src 'none'; script-src{digests['script']}; style-src{digests['style']}; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
