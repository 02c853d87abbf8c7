"""Rows of `relay.bench`: a storage unit under many writers and readers for a minute.

    python -m headrace.launch.bench.storage_load ADDRESS FIRST_WRITER NUM_WRITERS SECONDS      (one process of writers)

Each writer puts one row after the other and never has more than a few that nobody has consumed; readers look what there is,
check every byte, and drop it.
"""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np

from ...comm.rows import RowClient
from ...comm.waits import waiting
from .harness import Row

NUM_WRITERS, NUM_PROCESSES, NUM_READERS = 64, 4, 8
_NUM_TOKENS = 8192
_AHEAD = 4
_PATIENCE_S = 120.0
_UNIT = """
import sys
from headrace.comm.row_unit import RowUnit
unit = RowUnit("127.0.0.1")
print(unit.address, flush=True)
for _ in sys.stdin:
    resident = int(open("/proc/self/statm").read().split()[1]) * 4096
    print(unit.arena.num_bytes, unit.arena.held_bytes + resident, flush=True)
unit.close()
"""


class UnitProcess:
    """A storage unit in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _UNIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.address = self._line()

    def memory(self) -> tuple[int, int]:
        """Bytes of rows held, and memory of the process with the arena's, which is never mapped."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        held, resident = self._line().split()
        return int(held), int(resident)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def row_of(writer: int, number: int) -> dict[str, np.ndarray]:
    """The row that this writer writes as its `number`th: no two rows of a run are the same."""
    token_ids = np.arange(_NUM_TOKENS, dtype=np.int32) * (writer + 1) + number
    return {
        "token_ids": token_ids,
        "logprobs": token_ids.astype(np.float32),
        "loss_mask": np.full(_NUM_TOKENS, number % 2, np.uint8),
    }


def write(address: str, writer: int, seconds: float) -> int:
    """Put rows for so long; returns how many. Waits for its rows to be consumed."""
    client, number, until = RowClient(address, deadline_s=_PATIENCE_S), 0, time.monotonic() + seconds
    while time.monotonic() < until:
        client.put(f"{writer}.{number}", row_of(writer, number))
        number += 1
        with waiting("the readers", f"row {writer}.{number - _AHEAD}", _PATIENCE_S) as wait:
            oldest = f"{writer}.{number - _AHEAD}"
            wait.until(lambda key=oldest: not _is_held(client, key), interval_s=0.02)
    client.close()
    return number


def _is_held(client: RowClient, key: str) -> bool:
    try:
        client.get(key, [])
    except KeyError:
        return False
    return True


class Readers:
    """Threads that consume what writers put, each the rows of some writers."""

    def __init__(self, address: str) -> None:
        self.num_read = 0
        self._address = address
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="reader")
        self._readers = [self._pool.submit(self._read, reader) for reader in range(NUM_READERS)]

    def close(self) -> None:
        """Consume what is left, then end. Raises what a reader raised."""
        self._ended.set()
        for reader in self._readers:
            reader.result()
        self._pool.shutdown()

    def _read(self, reader: int) -> None:
        client = RowClient(self._address, deadline_s=_PATIENCE_S)
        while True:
            is_last = self._ended.is_set()
            mine = [key for key in client.listing() if int(key.partition(".")[0]) % NUM_READERS == reader]
            for key, columns in client.get_many(mine).items():
                writer, number = map(int, key.split("."))
                for name, column in row_of(writer, number).items():
                    assert np.array_equal(columns[name], column), f"column {name} of row {key} has other bytes"
            with self._lock:
                self.num_read += client.drop(mine)
            if is_last:
                break
            if not mine:
                time.sleep(1e-3)
        client.close()


def load(seconds: float) -> list[Row]:
    """Rows and bytes a second that went through a unit, and what its process held at the end against after a quarter.

    Raises AssertionError if a row was lost or changed, or if something is left in the unit.
    """
    with ExitStack() as stack:
        unit = UnitProcess()
        stack.callback(unit.close)
        readers, per_process = Readers(unit.address), NUM_WRITERS // NUM_PROCESSES
        commands = [
            [unit.address, str(first), str(per_process), str(seconds)] for first in range(0, NUM_WRITERS, per_process)
        ]
        started = time.monotonic()
        writers = [
            subprocess.Popen(
                [sys.executable, "-m", "headrace.launch.bench.storage_load", *command],
                stdout=subprocess.PIPE,
                text=True,
            )
            for command in commands
        ]
        time.sleep(seconds / 4)
        _, early = unit.memory()
        num_written = sum(int(writer.communicate()[0]) for writer in writers)
        elapsed_s = time.monotonic() - started
        readers.close()
        held, late = unit.memory()
    assert (readers.num_read, held) == (num_written, 0), (
        f"{num_written} written, {readers.num_read} read, {held} B left"
    )
    num_bytes = sum(column.nbytes for column in row_of(0, 0).values())
    return [
        Row("load-rows", "rows written", num_written / elapsed_s, "1/s", readers.num_read / num_written),
        Row("load-bytes", "bytes written", num_written * num_bytes / elapsed_s / 1e6, "MB/s", 1.0),
        Row("load-memory", "after a quarter", late / 1e6, "MB", late / early),
    ]


def main(address: str, first: int, count: int, seconds: float) -> None:
    """One process of writers: prints how many rows they wrote."""
    with ThreadPoolExecutor(count) as pool:
        print(sum(pool.map(lambda writer: write(address, writer, seconds), range(first, first + count))))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
