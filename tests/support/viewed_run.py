"""The folder of a run with samples and metrics, and the server of `headrace view` on it."""

import json
import math
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgspec
from support.closing import at_end

from headrace.launch.report.viewer.server import ViewerServer, open_server

PATIENCE_S = 60.0


def sample(step: int, number: int, num_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """A line of `samples.jsonl`, as of a sorting task; figures follow from the numbers."""
    digits = "".join(str((step * 7 + number * 3 + i) % 10) for i in range(num_tokens - 2))
    texts = ["#", *sorted(digits), "<eos>"]
    generator = [-((step + number + i) % 7) / 4 for i in range(num_tokens)]
    trainer = [value - (i % 3) / 8 for i, value in enumerate(generator)]
    return {
        "step": step, "group": f"0.{step * 100 + number // 8}", "sample": number % 8, "prompt": f"{digits}:",
        "response": "".join(texts), "reward": (number % 5) / 4, "rewards": {"reward": (number % 5) / 4}, "metrics": {}, "notes": {},
        "advantage": (number % 5) / 2 - 1, "versions": [max(step - 1 - number % 3, 0)], "staleness": min(number % 3, step - 1),
        "finish": "cut" if number % 16 == 15 else "ended", "num_prompt_tokens": 8, "num_tokens": num_tokens,
        "num_trained": num_tokens, "num_turns": 1, "num_calls": 0, "num_failed_calls": 0, "turns": [],
        "tokens": {"ids": [*range(num_tokens)], "texts": texts, "generator": generator, "trainer": trainer, "ratio": [
            math.exp(a - b) for a, b in zip(trainer, generator, strict=True)]},
    } | fields  # fmt: skip


def with_call(
    step: int, number: int, expression: str, result: str, answer: str, *, failed: bool = False
) -> dict[str, Any]:
    """A sample of the calculator that calls its tool once."""
    pieces = [f"<calc>{expression}</calc>", f"<result>{result}</result>", answer]
    ends = [len("".join(pieces[: index + 1])) for index in range(3)]
    turns: list[dict[str, Any]] = [
        {"by": "environment" if index == 1 else "policy", "start": end - len(piece), "end": end, "text": piece}
        for index, (piece, end) in enumerate(zip(pieces, ends, strict=True))
    ]
    turns[0]["calls"] = [{"name": "calc", "arguments": [expression], "result": result, "failed": failed}]
    texts = list("".join(pieces))
    drawn = [None if ends[0] <= place < ends[1] else -0.5 for place in range(len(texts))]
    tokens = {
        "ids": [*range(len(texts))],
        "texts": texts,
        "generator": drawn,
        "trainer": drawn,
        "ratio": [each and 1.0 for each in drawn],
    }
    own = {
        "prompt": "37*48=",
        "response": "".join(pieces),
        "num_turns": 2,
        "num_calls": 1,
        "num_failed_calls": int(failed),
    }
    return sample(
        step, number, **own, turns=turns, tokens=tokens, num_tokens=len(texts), reward=float(answer == "1776")
    )


def write_samples(folder: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Add lines, and the file that says that the folder is a run's."""
    (folder / "config.yaml").touch()
    with (folder / "samples.jsonl").open("ab") as file:
        file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)


def write_metrics(folder: Path, steps: Iterable[int]) -> None:
    """Add lines of metrics; one of the numbers is not finite."""
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            line = {
                "step": step,
                "reward/mean": step / 100,
                "actor/entropy": 1 / (step + 1),
                "own/number": math.nan if step == 1 else step,
            }
            file.write(json.dumps(line | {"staleness/hist": {"0": 3}}) + "\n")


def serve(folder: Path) -> ViewerServer:
    """A server that ends with the test."""
    server = open_server(folder, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def close() -> None:
        server.shutdown()
        thread.join(PATIENCE_S)
        server.server_close()

    at_end(close)
    return server


def fetch(server: ViewerServer, rest: str, **headers: str) -> bytes:
    """What the server answers to an address below the page's. Raises `HTTPError`."""
    with urlopen(Request(server.address + rest, headers=headers), timeout=PATIENCE_S) as answer:
        return answer.read()
