"""A link over loopback compared with a raw socket.

python -m bench.links STORE SOCKET NUM_BYTES [tls]      (the receiving process)
"""

import socket
import sys

import numpy as np

from headrace.comm.links.opening import open_link
from headrace.comm.links.tls import TlsIdentity
from headrace.comm.store.client import StoreClient
from headrace.comm.store.server import StoreServer

from .harness import BenchProcess, Measurement, Options, best_seconds, command

_PIECE = 1 << 20
_REPEATS = 12
_DEADLINE_S = 30.0


def tcp_link(name: str, options: Options) -> list[Measurement]:
    """A link compared with a raw socket; in turns, both send a version in pieces of 1 MiB to another process.

    `tls-link` is encrypted, the raw socket is not.
    """
    is_tls = name == "tls-link"
    num_bytes, hosted = options.megabytes << 20, StoreServer("127.0.0.1", b"").start()
    buffer, done = np.zeros(num_bytes, np.uint8), np.zeros(1, np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words = command("links", hosted.address, f"127.0.0.1:{listener.getsockname()[1]}", num_bytes, *["tls"][:is_tls])
        with BenchProcess(words):
            listener.settimeout(_DEADLINE_S)
            connection = listener.accept()[0]
            tls = TlsIdentity() if is_tls else None
            store = StoreClient.connect(hosted.address, b"", _DEADLINE_S)
            link = open_link("tcp", store, "bench", 0, _DEADLINE_S, tls=tls)

            def send_raw() -> None:
                for start in range(0, num_bytes, _PIECE):
                    connection.sendall(buffer[start : start + _PIECE].data)
                connection.recv(1)

            def send() -> None:
                for start in range(0, num_bytes, _PIECE):
                    link.send(buffer[start : start + _PIECE], _DEADLINE_S)
                link.receive(done, _DEADLINE_S)

            raw_s, link_s = best_seconds(send_raw, send, repeats=_REPEATS)
            connection.close()
            link.close()
            store.close()
    hosted.close()
    return [Measurement(name, "raw socket", num_bytes / link_s / 1e9, "GB/s", raw_s / link_s)]


def _receive(store: str, address: str, num_bytes: int, tls: TlsIdentity | None) -> None:
    """Receive a version from the socket and from the link, in turns, and confirm each."""
    host, port = address.split(":")
    buffer, done = np.zeros(num_bytes, np.uint8), np.zeros(1, np.uint8)
    with socket.create_connection((host, int(port)), _DEADLINE_S) as connection:
        link = open_link("tcp", StoreClient.connect(store, b"", _DEADLINE_S), "bench", 1, _DEADLINE_S, tls=tls)
        for _ in range(_REPEATS):
            filled = 0
            while filled < num_bytes:
                filled += connection.recv_into(buffer[filled : filled + _PIECE].data)
            connection.sendall(b"x")
            for start in range(0, num_bytes, _PIECE):
                link.receive(buffer[start : start + _PIECE], _DEADLINE_S)
            link.send(done, _DEADLINE_S)
        link.close()


if __name__ == "__main__":
    _receive(sys.argv[1], sys.argv[2], int(sys.argv[3]), TlsIdentity() if sys.argv[4:] else None)
