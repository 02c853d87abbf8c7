"""A client of the Tinker API without the SDK, the bodies of its requests, and a server for it in this process."""

import http.client
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from headrace.comm.recipe import GeneratorSettings, ModelSettings, Recipe
from headrace.launch.serving.tinker.server import TinkerOptions, TinkerServer
from headrace.launch.serving.tinker.wire import data_field, integer_field

from .closing import at_end

PATIENCE_S = 120.0
TOKENS = [5, 6, 7, 8, 9, 10]
ADAM = {"learning_rate": 0.01}


class Client:
    """A client without the SDK."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.headers: dict[str, str] = {}
        self.session = ""
        self.close: Callable[[], None] = lambda: None
        """Ends the server, if it is in this process."""

    def ask(self, path: str, body: Any = None, method: str = "", kind: str = "application/json") -> tuple[int, Any]:
        """One request: the status and the parsed answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Content-Type": kind, **self.headers}
        try:
            connection.request(method or ("GET" if body is None else "POST"), f"/api/v1/{path}", raw, headers)
            answer = connection.getresponse()
            given = answer.read()
            is_json = answer.headers["content-type"] == "application/json"
            return answer.status, json.loads(given) if is_json else given
        finally:
            connection.close()

    def get(self, path: str, body: Any = None, **more: Any) -> Any:
        """The answer to a request that succeeds."""
        status, answer = self.ask(path, body, **more)
        assert status == 200, answer
        return answer

    def error(self, path: str, body: Any = None, **more: Any) -> tuple[int, str]:
        """The status and the message of a request that does not."""
        status, answer = self.ask(path, body, **more)
        assert status >= 400, answer
        return status, answer["error"]["message"]

    def result(self, first: Any) -> Any:
        """The result of a request, which may be an error."""
        return self.get("retrieve_future", {"request_id": first["request_id"]})

    def begin(self) -> str:
        """A session, and a model in it; returns the model's id."""
        self.session = self.get("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "x"})["session_id"]
        return self.result(self.create())["model_id"]

    def create(self, number: int = 0) -> Any:
        config = {"rank": 4, "seed": 1}
        body = {"session_id": self.session, "model_seq_id": number, "base_model": "tiny", "lora_config": config}
        return self.get("create_model", body)

    def loss(self, model_id: str, number: int, weight: float = 1.0, name: str = "cross_entropy") -> Any:
        return self.get("forward_backward", loss_body(model_id, number, weight, name), kind="application/x-protobuf")

    def step(self, model_id: str, number: int) -> Any:
        return self.get("optim_step", {"model_id": model_id, "seq_id": number, "adam_params": ADAM})

    def sampler(self, model_id: str, number: int, seq: int, **more: Any) -> str:
        body = {"model_id": model_id, "seq_id": number, "sampling_session_seq_id": seq, **more}
        return self.result(self.get("save_weights_for_sampler", body))["sampling_session_id"]


def serve(
    model: Path,
    folder: Path,
    dtype: Literal["float32", "bfloat16"] = "float32",
    every: int | None = None,
    **options: Any,
) -> Client:
    """A client of a server of a model in this process, until the end of the test. every: updates between two checkpoints."""
    recipe = Recipe(model=ModelSettings(path=str(model), dtype=dtype))
    checkpoint = replace(recipe.checkpoint, every=every)
    recipe = replace(recipe, generator=GeneratorSettings(max_running=4), checkpoint=checkpoint)
    server = TinkerServer(recipe, TinkerOptions("tiny", folder, **options))
    is_ended = threading.Event()
    worker = threading.Thread(target=lambda: server.run(is_ended.is_set), name="trainer", daemon=True)

    def close() -> None:
        is_ended.set()
        worker.join(PATIENCE_S)
        server.close()

    at_end(close)
    server.start()
    worker.start()
    client = Client(server.http.port)
    client.close = close
    return client


def loss_body(model_id: str, number: int, weight: float = 1.0, loss: str = "cross_entropy") -> bytes:
    def tensor(array: np.ndarray, dtype: int) -> bytes:
        return data_field(1, array.tobytes()) + integer_field(3, dtype) + integer_field(4, len(array))

    tokens = np.array(TOKENS)
    inputs = {
        "target_tokens": tensor(tokens[1:].astype("<i8"), 2),
        "weights": tensor(np.full(len(tokens) - 1, weight, "<f4"), 1),
    }
    chunk = data_field(1, data_field(1, tokens[:-1].astype("<i4").tobytes()))
    datum = data_field(1, chunk)
    for name, value in inputs.items():
        datum += data_field(2, data_field(1, name.encode()) + data_field(2, value))
    head = data_field(1, model_id.encode()) + integer_field(2, number)
    return head + data_field(3, datum) + data_field(4, loss.encode())


def sample_body(sampler: str, number: int = 0, **changes: Any) -> dict[str, Any]:
    params = {"max_tokens": 4, "seed": 1, **changes.pop("params", {})}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:2]}]}
    return {
        "sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "sampling_params": params, "type": "sample", **changes,
    }  # fmt: skip
