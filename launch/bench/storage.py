"""Rows of `relay.bench`: a storage unit beside TransferQueue's."""

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path

import numpy as np

from ...comm.rows import Columns, RowClient
from ...comm.waits import waiting
from .harness import Row
from .storage_load import UnitProcess

NUM_ROWS, NUM_COLUMNS, NUM_TOKENS = 1024, 9, 8192
_ROUNDS = 8


class Peer:
    """TransferQueue in its own interpreter, asked for one round after the other."""

    def __init__(self, python: str) -> None:
        sizes = [str(size) for size in (NUM_ROWS, NUM_COLUMNS, NUM_TOKENS)]
        script = str(Path(__file__).with_name("transferqueue_peer.py"))
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [python, script, *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )
        with waiting("TransferQueue", "its start", 300):
            self._expect("ready")

    def round(self) -> dict[str, float]:
        """Seconds of put, list, get and clear."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        return json.loads(self._expect("{"))

    def close(self) -> None:
        """End it."""
        self._process.communicate()

    def _expect(self, start: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # between the answers there are lines of its libraries' own
            if line.startswith(start):
                return line
        raise RuntimeError("TransferQueue has ended; what it said stands above")


def beside_peer(peer_python: str) -> list[Row]:
    """Put, get, list, clear of 1,024 rows x 9 columns x 8,192 int32, in turns with the peer; the best round of each."""
    rows, num_bytes = _table(), NUM_ROWS * NUM_COLUMNS * NUM_TOKENS * 4
    with contextlib.ExitStack() as stack:
        unit = UnitProcess()
        stack.callback(unit.close)
        client = RowClient(unit.address)
        stack.callback(client.close)
        peer = Peer(peer_python)
        stack.callback(peer.close)
        rounds = [(_seconds_of_a_round(client, rows), peer.round()) for _ in range(_ROUNDS)]
    found: list[Row] = []
    for name in ("put", "get", "list", "clear"):
        ours, theirs = (min(each[side][name] for each in rounds) for side in (0, 1))
        is_bulk = name in ("put", "get")
        value = num_bytes / ours / 1e9 if is_bulk else ours * 1e3
        found.append(Row(name, "transferqueue", value, "GB/s" if is_bulk else "ms", theirs / ours))
    return found


def _table() -> dict[str, Columns]:
    random = np.random.default_rng(0)
    table = random.integers(0, 1000, (NUM_COLUMNS, NUM_ROWS, NUM_TOKENS), dtype=np.int32)
    return {str(i): {f"column_{j}": table[j, i] for j in range(NUM_COLUMNS)} for i in range(NUM_ROWS)}


def _seconds_of_a_round(client: RowClient, rows: dict[str, Columns]) -> dict[str, float]:
    works = {
        "put": lambda: client.put_many(rows),
        "list": client.listing,
        "get": lambda: client.get_many(rows),
        "clear": lambda: client.drop(rows),
    }
    seconds: dict[str, float] = {}
    for name, work in works.items():
        started = time.perf_counter()
        work()
        seconds[name] = time.perf_counter() - started
    return seconds
