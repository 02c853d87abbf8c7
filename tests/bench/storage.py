"""A storage unit compared with TransferQueue's."""

import os
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import numpy as np

from headrace.comm.storage.client import StorageClient
from headrace.launch.processes.child import print_message

from .harness import ENVIRONMENT, BenchProcess, Measurement, Options, best_seconds, command

_NUM_ROWS, _NUM_COLUMNS, _NUM_TOKENS = 1024, 9, 8192
_ROUNDS = 8
_PEER = Path(__file__).with_name("transferqueue_peer.py")


def beside_peer(name: str, options: Options) -> list[Measurement]:
    """Put, get, list, clear of 1,024 rows x 9 columns x 8,192 int32, in turns with the peer; the best round of each."""
    if options.peer_python is None:
        print_message(f"{name} is left out: name an interpreter with TransferQueue by --peer-python")
        return []
    table = np.random.default_rng(0).integers(0, 1000, (_NUM_COLUMNS, _NUM_ROWS, _NUM_TOKENS), dtype=np.int32)
    rows = {str(i): {f"column_{j}": table[j, i] for j in range(_NUM_COLUMNS)} for i in range(_NUM_ROWS)}
    sizes = map(str, (_NUM_ROWS, _NUM_COLUMNS, _NUM_TOKENS))
    environment = {key: value for key, value in os.environ.items() if key not in ENVIRONMENT}
    with ExitStack() as stack:
        unit = stack.enter_context(BenchProcess(command("storage_load", "unit")))
        client = stack.enter_context(closing(StorageClient(unit.line())))
        peer = stack.enter_context(BenchProcess([options.peer_python, str(_PEER), *sizes], environment))
        peer.line("ready")
        rounds: list[dict[str, float]] = []
        works = {
            "put": lambda: client.put_many(rows),
            "list": client.listing,
            "get": lambda: client.get_many(rows),
            "clear": lambda: client.drop(rows),
            "peer": lambda: rounds.append(msgspec.json.decode(peer.ask("{"))),
        }
        ours = dict(zip(works, best_seconds(*works.values(), repeats=_ROUNDS), strict=True))
    figures = {name: (table.nbytes / ours[name] / 1e9, "GB/s") for name in ("put", "get")}
    figures |= {name: (ours[name] * 1e3, "ms") for name in ("list", "clear")}
    return [
        Measurement(name, "transferqueue", value, unit, min(each[name] for each in rounds) / ours[name])
        for name, (value, unit) in figures.items()
    ]
