"""The front of a run: HTTP requests are answered by its rollouts, while they generate for training."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.served import Served
from support.system import System

pytest.importorskip("uvicorn")
from headrace.rollout.serving import run_front

PROMPT = [5, 6, 7, 8]


class Fronted(System):
    """A run with a front, and a client of it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **{"rollout.serve": "0", "run.steps": 40} | settings)

    def client(self) -> Served:
        """A client, once the front has told its address."""
        file = self.dir / run_front.SERVE_FILE
        self.until(file.exists)
        url = json.loads(file.read_text())["url"]
        return Served(int(url.rpartition(":")[2]), None, None, None)  # pyright: ignore[reportArgumentType]


def test_a_rollout_answers_while_it_trains(tmp_path: Path):
    system = Fronted(tmp_path)
    system.start_all()
    system.start("front", run_front.run)
    client = system.client()
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 8, "seed": 3, "ignore_eos": True}}
    reply = client.ask("/inference/v1/generate", body)
    assert reply.status == 200, reply.body
    (choice,) = reply.body["choices"]
    assert len(choice["token_ids"]) == len(choice["weight_version"]) == 8
    summary = system.wait()
    print(summary["tokens"], summary["accounting"])
    assert summary["accounting"]["holds"] and summary["tokens"]["holds"]
