"""A crowd of strangers at the port of a real relay: connections that are silent, write slowly or send random bytes."""

import re
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random

from headrace.launch.processes.child import print_message

from ..harness import Measurement, Options
from .processes import Usage, usage_of
from .striker import open_striker

_NUM_CONNECTIONS, _SPARE_FILES = 2000, 200
_SECONDS, _PERIOD_S = 30.0, 0.5
_MOST_GROWTH = 1.25


def crowd(name: str, options: Options) -> list[Measurement]:
    """Connections to each port of a relay for 30 s: the steps meanwhile, and the relay's memory, files and threads afterwards over
    those before."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, _NUM_CONNECTIONS + _SPARE_FILES), limit))
    with open_striker(options.seed, num_relays=1) as striker:
        job = striker.job
        job.start()
        (pid,) = job.pids("relay-0")
        before, steps = _settled(pid), job.tail.steps
        num_connected = sum(_press(port, Random(options.seed)) for port in listening_ports(pid))
        job.tail.read()
        num_steps, after = job.tail.steps - steps, _settled(pid)
        survived = job.pids("relay-0") == [pid]
        problems = striker.finish()
    for problem in problems:
        print_message(problem)
    holds = survived and num_steps > 0 and not problems
    rows = [
        Measurement(f"{name}-connections", "", num_connected, "", float("nan")),
        Measurement(f"{name}-steps", "", num_steps, "steps", float("nan"), holds=holds),
    ]
    for field, unit in (("megabytes", "MB"), ("files", "files"), ("threads", "threads")):
        growth = getattr(after, field) / getattr(before, field)
        rows.append(
            Measurement(f"{name}-{field}", "before", getattr(after, field), unit, growth, holds=growth < _MOST_GROWTH)
        )
    return rows


def listening_ports(pid: int) -> list[int]:
    """The TCP ports on which a process listens."""
    sockets: set[str] = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets |= set(re.findall(r"^socket:\[(\d+)\]$", str(entry.readlink())))
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    found = [line.split() for line in lines]
    return sorted(int(words[1].rpartition(":")[2], 16) for words in found if words[3] == "0A" and words[9] in sockets)


def _settled(pid: int) -> Usage:
    """The resources of a process a moment later, when the threads of ended connections are gone."""
    time.sleep(2.0)
    usage = usage_of(pid)
    assert usage is not None, "the relay has ended"
    return usage


def _press(port: int, random: Random) -> int:
    """Keep the connections open for a while, and open those again that the relay ends; returns how many there were."""
    count, until = 0, time.monotonic() + _SECONDS
    with ExitStack() as stack:
        crowd = [stack.enter_context(connection) for connection in _connect(port)]
        count += len(crowd)
        while time.monotonic() < until:
            for number, connection in enumerate(crowd):
                try:
                    if number % 3:  # a third is silent, a third writes a byte at a time, a third whole pieces of noise
                        connection.send(random.randbytes(1 if number % 3 == 1 else 64))
                except OSError:
                    connection.close()
            ended = [connection for connection in crowd if connection.fileno() < 0]
            fresh = [stack.enter_context(connection) for _, connection in zip(ended, _connect(port), strict=False)]
            crowd = [connection for connection in crowd if connection.fileno() >= 0] + fresh
            count += len(fresh)
            time.sleep(_PERIOD_S)
    return count


def _connect(port: int) -> Iterator[socket.socket]:
    for _ in range(_NUM_CONNECTIONS):
        with suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", port), timeout=5.0)
            connection.setblocking(False)
            yield connection
