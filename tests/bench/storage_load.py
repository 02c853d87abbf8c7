"""A storage unit under many writers and readers for a minute.

    python -m bench.storage_load unit                                          (the unit)
    python -m bench.storage_load writers ADDRESS FIRST_WRITER NUM_WRITERS SECONDS

Each writer puts rows one after another, at most a few ahead of the readers. A reader lists the rows, checks every byte and
drops them.
"""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from headrace.comm.storage.client import StorageClient
from headrace.comm.storage.server import StorageServer
from headrace.comm.waits import waiting

from .harness import BenchProcess, Measurement, Options, command

_NUM_WRITERS, _NUM_PROCESSES, _NUM_READERS = 64, 4, 8
_NUM_TOKENS = 8192
_AHEAD = 4
_PATIENCE_S = 120.0


def load(name: str, options: Options) -> list[Measurement]:
    """Rows and bytes per second through a unit, and the memory of its process at the end over that after a quarter.

    Raises AssertionError if a row was lost or changed, or if a row is left in the unit.
    """
    per_process = _NUM_WRITERS // _NUM_PROCESSES
    with ExitStack() as stack:
        unit = stack.enter_context(BenchProcess(command("storage_load", "unit")))
        address, ended = unit.line(), threading.Event()
        pool = stack.enter_context(ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="reader"))
        stack.callback(ended.set)
        reading = [pool.submit(_read, address, reader, ended) for reader in range(_NUM_READERS)]
        started = time.monotonic()
        firsts = range(0, _NUM_WRITERS, per_process)
        commands = [
            command("storage_load", "writers", address, first, per_process, options.seconds) for first in firsts
        ]
        writers = [stack.enter_context(BenchProcess(words)) for words in commands]
        time.sleep(options.seconds / 4)
        _, early = map(int, unit.ask().split())
        num_written = sum(int(writer.line(deadline_s=options.seconds + _PATIENCE_S)) for writer in writers)
        elapsed_s = time.monotonic() - started
        ended.set()
        num_read = sum(reader.result(_PATIENCE_S) for reader in reading)
        held, late = map(int, unit.ask().split())
    assert (num_read, held) == (num_written, 0), f"{num_written} written, {num_read} read, {held} B left"
    num_bytes = sum(column.nbytes for column in row_of(0, 0).values())
    return [
        Measurement("load-rows", "rows written", num_written / elapsed_s, "1/s", num_read / num_written),
        Measurement("load-bytes", "bytes written", num_written * num_bytes / elapsed_s / 1e6, "MB/s", 1.0),
        Measurement("load-memory", "after a quarter", late / 1e6, "MB", late / early),
    ]


def row_of(writer: int, number: int) -> dict[str, np.ndarray]:
    """Row `number` of this writer: all rows of a run differ."""
    token_ids = np.arange(_NUM_TOKENS, dtype=np.int32) * (writer + 1) + number
    return {
        "token_ids": token_ids,
        "logprobs": token_ids.astype(np.float32),
        "loss_mask": np.full(_NUM_TOKENS, number % 2, np.uint8),
    }


def _read(address: str, reader: int, ended: threading.Event) -> int:
    """Consume this reader's share of the rows until `ended`, then the rest; returns their number."""
    client, num_read, is_last = StorageClient(address, deadline_s=_PATIENCE_S), 0, False
    while not is_last:
        is_last = ended.is_set()
        mine = [key for key in client.listing() if int(key.partition(".")[0]) % _NUM_READERS == reader]
        for key, columns in client.get_many(mine).items():
            writer, number = map(int, key.split("."))
            for name, column in row_of(writer, number).items():
                assert np.array_equal(columns[name], column), f"column {name} of row {key} has wrong bytes"
        num_read += client.drop(mine)
        if not mine:
            time.sleep(1e-3)
    client.close()
    return num_read


def _write(address: str, writer: int, seconds: float) -> int:
    """Put rows for `seconds`, at most `_AHEAD` ahead of the readers; returns their number."""
    client, number, until = StorageClient(address, deadline_s=_PATIENCE_S), 0, time.monotonic() + seconds
    while time.monotonic() < until:
        client.put(f"{writer}.{number}", row_of(writer, number))
        number += 1
        oldest = f"{writer}.{number - _AHEAD}"
        with waiting("the readers", f"row {oldest}", _PATIENCE_S) as wait:
            wait.until(lambda key=oldest: not _is_held(client, key), interval_s=0.02)
    client.close()
    return number


def _is_held(client: StorageClient, key: str) -> bool:
    try:
        client.get(key, [])
    except KeyError:
        return False
    return True


def _serve_writers(address: str, first: str, count: str, seconds: str) -> None:
    """The process of some writers; prints the number of their rows."""
    with ThreadPoolExecutor(int(count)) as pool:
        writers = range(int(first), int(first) + int(count))
        print(sum(pool.map(lambda writer: _write(address, writer, float(seconds)), writers)))


def _serve_unit() -> None:
    """The unit's process; prints its address, and for each line on stdin the bytes of its rows and of its memory."""
    unit = StorageServer("127.0.0.1").start()
    print(unit.address, flush=True)
    for _ in sys.stdin:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        print(unit.arena.num_bytes, unit.arena.resident_bytes + resident, flush=True)  # the arena is never mapped
    unit.close()


if __name__ == "__main__":
    {"unit": _serve_unit, "writers": _serve_writers}[sys.argv[1]](*sys.argv[2:])
