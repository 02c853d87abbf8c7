"""The benchmark of this floor and, in a process of its own, of the weights that travel on it.

    python -m headrace.launch.bench.links [--json FILE] [--only WORKLOAD ...] [--megabytes N]

The weights' own workloads are those of `python -m headrace.launch.bench.weights`, which this floor must not import.
"""

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from ...comm.links import Link, open_link
from ...comm.store import StoreServer
from .harness import HEADING, Row, Workload, best_seconds, parse, read_json, run, write_json

_PIECE = 1 << 20
_REPEATS = 12
_CHILD = """
import sys, numpy as np
from headrace.launch.bench.links import echo_link, echo_socket
(echo_link if sys.argv[1] == "link" else echo_socket)(sys.argv[2], int(sys.argv[3]))
"""


def echo_link(address: str, num_bytes: int) -> None:
    """The other end of the measured link: takes everything in and says when it has."""
    link = open_link("tcp", address, "bench", 1, 30)
    buffer, done = np.zeros(num_bytes, np.uint8), np.zeros(1, np.uint8)
    for _ in range(_REPEATS):
        for start in range(0, num_bytes, _PIECE):
            link.receive(buffer[start : start + _PIECE], 30)
        link.send(done, 30)
    link.close()


def echo_socket(address: str, num_bytes: int) -> None:
    """The same over a plain socket."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        view = memoryview(bytearray(num_bytes))
        for _ in range(_REPEATS):
            filled = 0
            while filled < num_bytes:
                filled += connection.recv_into(view[filled : filled + _PIECE])
            connection.sendall(b"x")


def tcp_link(num_bytes: int) -> list[Row]:
    """A link over loopback against a raw socket, both sending in pieces of 1 MiB to another process, in turns."""
    buffer, done, hosted = np.zeros(num_bytes, np.uint8), np.zeros(1, np.uint8), StoreServer("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        children = [
            _child("socket", f"127.0.0.1:{listener.getsockname()[1]}", num_bytes),
            _child("link", hosted.address, num_bytes),
        ]
        connection = listener.accept()[0]
    link: Link = open_link("tcp", hosted.address, "bench", 0, 30)

    def send_raw() -> None:
        for start in range(0, num_bytes, _PIECE):
            connection.sendall(buffer[start : start + _PIECE].data)
        connection.recv(1)

    def send() -> None:
        for start in range(0, num_bytes, _PIECE):
            link.send(buffer[start : start + _PIECE], 30)
        link.receive(done, 30)

    raw_s, link_s = best_seconds(send_raw, send, repeats=_REPEATS)
    connection.close()
    link.close()
    for child in children:
        child.wait()
    return [Row("tcp-link", "raw socket", num_bytes / link_s / 1e9, "GB/s", raw_s / link_s)]


def _child(kind: str, address: str, num_bytes: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", _CHILD, kind, address, str(num_bytes)])


WORKLOADS: dict[str, Workload] = {"tcp-link": tcp_link}


def _weights(arguments: list[str]) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [
            sys.executable,
            "-m",
            "headrace.launch.bench.weights",
            "--no-heading",
            *arguments,
            "--json",
            str(path),
        ]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(1)  # it has said why
        return read_json(path)


def main(argv: list[str]) -> None:
    """Run the workloads asked for, print the table."""
    arguments = parse("headrace.launch.bench.links", argv, [*WORKLOADS, "those of headrace.launch.bench.weights"])
    is_all = not arguments.only
    print(HEADING, flush=True)
    rows = run(WORKLOADS, [n for n in WORKLOADS if is_all or n in arguments.only], arguments.megabytes << 20)
    others = [name for name in arguments.only if name not in WORKLOADS]
    if is_all or others:
        rows += _weights(["--megabytes", str(arguments.megabytes), *(["--only", *others] if others else [])])
    if arguments.json is not None:
        write_json(rows, arguments.json)


if __name__ == "__main__":
    main(sys.argv[1:])
