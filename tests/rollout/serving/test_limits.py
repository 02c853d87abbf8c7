"""Who may ask, how much, and for how long; and what clients leave behind that go away: nothing."""

import http.client
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.closing import at_end, hang_up
from support.policies import character_tokenizer
from support.served import PATIENCE_S, ScriptedGenerator, Served, serve

from headrace.comm.errors import SettingError
from headrace.rollout import Engine
from headrace.rollout.serving import app, connections
from headrace.rollout.serving.access import Access
from headrace.rollout.serving.server import listen

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
KEY = "a-key-of-12-characters"


def front(**settings: Any) -> Served:
    return serve(ScriptedGenerator(), character_tokenizer(), **settings)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has ended a connection; waits for it."""
    with suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


def test_a_key_opens_every_route_and_nothing_else_does():
    served = front(keys=["another-key", KEY])
    for given, code in (("", "missing_api_key"), ("Bearer wrong-key", "invalid_api_key"), (f"Basic {KEY}", "missing_api_key"),
                        (f"Bearer {KEY}x", "invalid_api_key"), (f"Bearer {KEY[:-1]}", "invalid_api_key")):  # fmt: skip
        for path, body in (("/v1/models", None), (CHAT_PATH, HELLO), ("/inference/v1/generate", {"token_ids": [1]})):
            reply = served.ask(path, body, Authorization=given)
            assert (reply.status, reply.body["error"]["code"]) == (401, code)
            assert reply.headers["www-authenticate"] == "Bearer"
    assert served.ask("/v1/models", Authorization=f"Bearer {KEY}").status == 200
    assert served.ask("/v1/models", Authorization="bearer another-key").status == 200
    assert served.ask("/health", Authorization="").status == 200


def test_without_keys_only_this_machine_is_answered():
    served = front()
    assert served.ask("/v1/models", Host="evil.example").status == 403
    for host in ("localhost", "127.0.0.1:80", "[::1]:8000"):
        assert served.ask("/v1/models", Host=host).status == 200
    with pytest.raises(SettingError, match="--host=0.0.0.0: .*HEADRACE_API_KEY"):
        Access("0.0.0.0", [])
    assert Access("0.0.0.0", [KEY])
    with pytest.raises(SettingError, match="--api-key"):
        Access("127.0.0.1", ["short"])


def test_a_port_that_is_taken_and_a_host_that_is_not_here():
    with listen("127.0.0.1", 0) as opened:
        port = opened.getsockname()[1]
        with pytest.raises(SettingError, match=f"--port={port}: .*in use; --port=0"):
            listen("127.0.0.1", port)
    with pytest.raises(SettingError, match="--port=99999"):
        listen("127.0.0.1", 99999)
    with pytest.raises(SettingError, match="--host=no such host"):
        listen("no such host", 0)


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "code"),
    [
        ("/v1/nothing", None, {}, 404, "unknown_route"),
        (CHAT_PATH, None, {}, 405, "unknown_route"),
        (CHAT_PATH, b"{", {}, 400, "not_json"),
        (CHAT_PATH, b"[" * 100_000, {}, 400, "not_json"),
        (CHAT_PATH, b'{"messages": "\xff"}', {}, 400, "not_json"),
        (CHAT_PATH, b"[]", {}, 400, "not_an_object"),
        (CHAT_PATH, b"{}", {"Content_Type": "text/plain"}, 415, "wrong_content_type"),
        (TEXT_PATH, {"prompt": [1000]}, {}, 400, None),
        (TEXT_PATH, {"prompt": "a" * 300}, {}, 400, "context_length_exceeded"),
        (TEXT_PATH, {"prompt": "a", "max_tokens": 256}, {}, 400, "context_length_exceeded"),
        ("/v1/models/other", None, {}, 404, "model_not_found"),
    ],
)
def test_mistakes_get_an_error_in_the_shape_of_openai(path: str, body: Any, headers: Any, status: int, code: Any):
    reply = front().ask(path, body, **headers)
    assert (reply.status, reply.body["error"]["code"]) == (status, code)
    assert reply.body["error"]["message"] and reply.body["error"]["type"] == "invalid_request_error"


def test_the_list_of_models_has_the_context():
    (card,) = front().ask("/v1/models").body["data"]
    assert (card["id"], card["max_model_len"], card["weight_version"]) == ("policy", 256, 7)


def test_a_body_that_is_too_large_is_refused_without_keeping_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "MOST_BYTES", 1000)
    monkeypatch.setattr(app, "DRAINED_BYTES", 1 << 20)
    served = front()
    assert served.ask(CHAT_PATH, b"x" * 1001).status == 413
    assert served.ask(CHAT_PATH, b"x" * (1 << 20)).status == 413
    chunks = served.connect()
    chunks.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
    chunks.sendall(b"Transfer-Encoding: chunked\r\n\r\n" + b"400\r\n" + b"y" * 1024 + b"\r\n0\r\n\r\n")
    assert b" 413 " in chunks.recv(100)
    waits = served.connect()
    waits.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
    waits.sendall(b"Expect: 100-continue\r\nContent-Length: 1001\r\n\r\n")
    assert b" 413 " in waits.recv(100), "a client that asks first need not send the body"
    assert served.ask(CHAT_PATH, HELLO).status == 200


def test_a_body_that_does_not_come_ends_its_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "BODY_S", 0.2)
    slow = front().connect()
    slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
    slow.sendall(b"Content-Length: 100\r\n\r\n{")
    assert b" 408 " in slow.recv(100)
    assert is_closed(slow)


def test_headers_that_do_not_come_end_the_connection(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEADERS_S", 0.3)
    served = front()
    silent = served.connect()
    begun = served.connect()
    begun.sendall(b"GET /v1/models HTTP/1.1\r\nHost: ")
    assert is_closed(silent) and is_closed(begun)


def test_idle_connections_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 20)
    served = front()
    before = num_files()
    idle = [served.connect() for _ in range(200)]
    assert served.ask(CHAT_PATH, HELLO).status == 200
    assert sum(is_closed(connection) for connection in idle[:100]) == 100
    for connection in idle:
        hang_up(connection)
    served.wait_until(lambda: num_files() <= before)


def test_too_many_requests_are_told_to_come_back():
    generator = ScriptedGenerator()
    served = serve(generator, character_tokenizer(), most_samples=3)
    generator.may_step.clear()
    body = {**HELLO, "n": 2, "max_tokens": 4}
    waiting = served.connect()
    waiting.sendall(request_of(CHAT_PATH, body))
    served.wait_until(lambda: served.desk.num_samples == 2)
    assert served.ask(CHAT_PATH, {**body, "n": 4}).status == 400, "it will never fit"
    reply = served.ask(CHAT_PATH, body)
    assert (reply.status, reply.body["error"]["code"], reply.headers["retry-after"]) == (429, "too_many_requests", "1")
    generator.may_step.set()
    assert b" 200 " in waiting.recv(100)
    served.wait_until(lambda: served.desk.num_samples == 0)
    assert served.ask(CHAT_PATH, body).status == 200


def test_a_request_that_takes_too_long_ends_and_is_dropped():
    generator = ScriptedGenerator()
    served = serve(generator, character_tokenizer(), timeout_s=0.2)
    generator.may_step.clear()
    reply = served.ask(CHAT_PATH, HELLO)
    assert (reply.status, reply.body["error"]["code"]) == (504, "timeout")
    assert served.events(CHAT_PATH, HELLO)[-1]["error"]["code"] == "timeout"
    served.wait_until(lambda: generator.idle and served.desk.num_served == 0)


def test_clients_that_go_away_leave_no_sequence_no_page_and_no_file(llama: Path):
    """In the middle of a stream, and while they wait for a whole answer."""
    engine = Engine(llama, max_running=4)
    served = serve(engine, character_tokenizer())
    served.ask(TEXT_PATH, {"prompt": "a"})
    before = num_files()
    free = engine.pool.num_free
    forever = {"prompt": "ab", "max_tokens": 200, "ignore_eos": True, "n": 3}
    for number in range(12):
        leaver = served.connect()
        leaver.sendall(request_of(TEXT_PATH, {**forever, "stream": number % 2 == 0}))
        if number % 2 == 0:
            assert b"200 OK" in leaver.recv(50)
        else:
            served.wait_until(lambda: served.desk.num_samples > 0)
        hang_up(leaver)
    served.wait_until(lambda: engine.idle and served.desk.num_served == 0)
    served.wait_until(lambda: num_files() <= before and served.desk.num_samples == 0)
    assert engine.pool.num_free == free
    engine.check()
    assert served.ask(TEXT_PATH, {"prompt": "a"}).status == 200


def test_a_client_that_does_not_read_blocks_nobody_and_is_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "UNREAD_S", 0.3)
    generator = ScriptedGenerator()
    served = serve(generator, character_tokenizer(), context=1 << 20, send_buffer=4096)
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.settimeout(PATIENCE_S)
    deaf.connect(("127.0.0.1", served.port))
    deaf.sendall(request_of(TEXT_PATH, {"prompt": "a", "max_tokens": 4000, "stream": True}))
    served.wait_until(lambda: generator.num_steps > 10)
    for _ in range(3):
        assert served.ask(CHAT_PATH, {**HELLO, "max_tokens": 3}).status == 200
    served.wait_until(lambda: generator.idle)
    deaf.close()


def test_requests_on_one_connection_follow_one_another():
    served = front()
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
    at_end(connection.close)
    for streams in (False, True, False):
        body = json.dumps({**HELLO, "max_tokens": 2, "stream": streams})
        connection.request("POST", CHAT_PATH, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read()
        assert connection.sock is not None, "the server keeps it open"
    served.wait_until(lambda: served.desk.num_samples == 0)


def test_a_server_that_ends_ends_its_answers():
    generator = ScriptedGenerator()
    served = serve(generator, character_tokenizer())
    generator.may_step.clear()
    waiting = served.connect()
    waiting.sendall(request_of(CHAT_PATH, HELLO))
    served.wait_until(lambda: served.desk.num_samples == 1)
    served.thread.close()
    assert b"200 OK" not in waiting.recv(100)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", served.port), 1)


def request_of(path: str, body: Any) -> bytes:
    """A request as a client sends it."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw
