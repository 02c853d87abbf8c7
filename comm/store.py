"""The fleet's store: a TCPStore server of our own, bound to one interface, and how it is found.

    python -m headrace.comm.store --interface 127.0.0.1 [--port 0] [--publish] [--expect N] [--silence-s S]

The first supervisor starts this process. Its first line on stdout is `store HOST:PORT`. With `--publish` it also puts the
address under a key of torchrun's own store, where `find_address` of the other processes finds it; `HEADRACE_STORE=HOST:PORT`
in the environment overrides that. The process exits with 0 on SIGTERM, or once at least `--expect` members (default 1) have
joined and each of them has left or has been silent for `--silence-s` seconds (default 60). It ignores SIGINT, since Ctrl-C
reaches every process of a terminal and the store has to end last. With `--end-with-parent` it ends when its parent is gone.

The store has no authentication: any client that reaches the port can act as a member. So a trusted network is required against
denial of service; mailboxes refuse forged messages.
"""

import argparse
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast

from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from .errors import SettingError, StoreGone
from .host import join_address, listen, split_address
from .waits import Wait, waiting

# A TCPStore client looks up the name of the address it connects to. Where the name server does not answer, the resolver
# would wait 5 s before it asks again.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

_ADDRESS_KEY = "headrace/store"
_ATTEMPT_S, _RETRY_S = 3.0, 0.1
ROSTER = "fleet/roster"
"""Key of the names of all members that ever joined, one on each line, in the order of their first joining."""


class StoreClient(Protocol):
    """The methods of `TCPStore` in use, since its type stubs lack half of them. Each may raise `DistError`."""

    def clone(self) -> "StoreClient": ...
    def set_timeout(self, timeout: timedelta, /) -> None: ...
    def set(self, key: str, value: bytes | str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def append(self, key: str, value: bytes | str, /) -> None: ...
    def check(self, keys: Sequence[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...
    def multi_get(self, keys: Sequence[str], /) -> list[bytes]: ...
    def queue_push(self, key: str, value: bytes, /) -> None: ...
    def queue_pop(self, key: str, block: bool, /) -> bytes: ...


class StoreServer:
    """A TCPStore server in this process, on `interface` alone, as long as this object lives; port 0 takes a free one."""

    def __init__(self, interface: str, port: int = 0) -> None:
        listener, self.address = listen(interface, port)
        with listener:
            # Binding by the store itself would listen on every interface of the machine.
            server = TCPStore(
                *split_address(self.address), is_master=True, wait_for_workers=False, multi_tenant=False,
                master_listen_fd=listener.detach(), use_libuv=True, timeout=timedelta(days=1),
            )  # fmt: skip
        self.store = cast(StoreClient, server)


def connect_store(address: str, deadline_s: float, *, is_started: bool = True) -> StoreClient:
    """A client of the store at "host:port". A thread that waits on the store needs a `clone()`. Raises `StoreGone`.

    A host that does not answer is tried again until the deadline. Without `is_started`, so is one that refuses the connection.
    """
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise SettingError(f"the store's address (HEADRACE_STORE): {error}") from error
    with waiting(f"store {address}", "a connection", deadline_s) as wait:
        _wait_for_listener(host, port, wait, is_started)
        try:
            client = TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=deadline_s)
            )
        except DistError as error:
            raise StoreGone(f"no store answers at {address}: {error}") from error
    store = cast(StoreClient, client)
    store.set_timeout(timedelta(days=1))
    return store


def _wait_for_listener(host: str, port: int, wait: Wait, is_started: bool) -> None:
    """Return once a connection is accepted. A TCPStore client would try until its timeout where the store has ended."""
    while True:
        try:
            socket.create_connection((host, port), min(_ATTEMPT_S, wait.remaining_s + 0.1)).close()
            return
        except OSError as error:
            if (is_started and isinstance(error, ConnectionRefusedError)) or not wait.remaining_s:
                raise StoreGone(f"no store answers at {join_address(host, port)}: {error}") from error
        time.sleep(min(_RETRY_S, wait.remaining_s))


def publish_address(address: str) -> None:
    """Put the fleet store's address into the store of this torchrun, for `find_address`."""
    store = _torchrun_store(deadline_s=30)
    store.set(_ADDRESS_KEY, address)
    store.check([_ADDRESS_KEY])


def find_address(deadline_s: float) -> str:
    """The fleet store's address: `HEADRACE_STORE` if set, else the address in torchrun's store."""
    if address := os.environ.get("HEADRACE_STORE"):
        return address
    store = _torchrun_store(deadline_s)
    with waiting("the first supervisor", "the fleet store's address", deadline_s) as wait:
        wait.until(lambda: store.check([_ADDRESS_KEY]), interval_s=0.02)
    return store.get(_ADDRESS_KEY).decode()


def _torchrun_store(deadline_s: float) -> StoreClient:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise SettingError("not started by torchrun: use torchrun, or set HEADRACE_STORE=HOST:PORT")
    return connect_store(join_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), deadline_s)


class _Attendance:
    """Counts the members that are present, by their heartbeats and this process's own clock."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._beats: dict[str, tuple[bytes, float]] = {}

    def present(self, store: StoreClient, now: float) -> tuple[int, int]:
        """The number of members that have joined so far, and the number of them that are present."""
        names = store.get(ROSTER).decode().split() if store.check([ROSTER]) else []
        num_present = 0
        for name in names:
            beat = store.get(f"fleet/beat/{name}")
            if beat != self._beats.get(name, (b"", 0.0))[0]:
                self._beats[name] = (beat, now)
            has_left = store.check([f"fleet/left/{name}"])
            num_present += not has_left and now - self._beats[name][1] < self._silence_s
        return len(names), num_present


def _serve(arguments: argparse.Namespace) -> None:
    """Run the store until its members have left. Waits for them by its own clock; woken by SIGTERM."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    hosted = StoreServer(arguments.interface, arguments.port)
    print(f"store {hosted.address}", flush=True)
    if arguments.publish:
        publish_address(hosted.address)
    attendance = _Attendance(arguments.silence_s)
    while not ended.wait(0.1):
        num_joined, num_present = attendance.present(hosted.store, time.monotonic())
        if num_joined >= arguments.expect and num_present == 0:
            return
        if arguments.end_with_parent and os.getppid() != parent:
            return


def main(argv: list[str]) -> None:
    """Entry of the store's process; the module's docstring describes the flags."""
    parser = argparse.ArgumentParser(prog="python -m headrace.comm.store", description="The fleet's store.")
    parser.add_argument("--interface", default="127.0.0.1", help="the one address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--publish", action="store_true", help="make the address known through torchrun's store")
    parser.add_argument("--expect", type=int, default=1, help="members that must have joined before it may end")
    parser.add_argument(
        "--silence-s", type=float, default=60.0, help="seconds without a beat that count as having left"
    )
    parser.add_argument("--end-with-parent", action="store_true", help="end when the process that started it is gone")
    _serve(parser.parse_args(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
