"""The peer of the workload `units`: the same rows in TransferQueue's simple storage, timed in its own interpreter.

    PEER_PYTHON tests/bench/transferqueue_peer.py NUM_ROWS NUM_COLUMNS NUM_TOKENS

It runs by path, because that interpreter has TransferQueue, Ray and torch but not this project. It prints `ready`. For each
line on stdin it puts, lists, gets and clears all rows once and prints the seconds of each as JSON.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module


def seconds(work: Callable[[], object]) -> float:
    """The time of one operation."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main(num_rows: int, num_columns: int, num_tokens: int) -> None:
    """Serve rounds until stdin ends."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray, queue = import_module("ray"), import_module("transfer_queue")
    torch, tensordict = import_module("torch"), import_module("tensordict")
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        # Its actors request more cores than a small machine has; `init` would wait for them for ever.
        ray.init(num_cpus=32, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=folder)
        queue.init()
        columns = {
            f"column_{i}": torch.randint(0, 1000, (num_rows, num_tokens), dtype=torch.int32) for i in range(num_columns)
        }
        table, keys = tensordict.TensorDict(columns, batch_size=num_rows), [str(i) for i in range(num_rows)]
        works = {
            "put": lambda: queue.kv_batch_put(keys, "rows", table),
            "list": lambda: queue.kv_list("rows"),
            "get": lambda: queue.kv_batch_get(keys, "rows"),
            "clear": lambda: queue.kv_clear(keys, "rows"),
        }
        print("ready", flush=True)
        for _ in sys.stdin:
            print(json.dumps({name: seconds(work) for name, work in works.items()}), flush=True)
        queue.close()
        ray.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
