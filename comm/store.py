"""The fleet's store: a TCPStore server of our own, bound to one interface, and how it is found.

    python -m headrace.comm.store --interface 127.0.0.1 [--port 0] [--recipe FILE] [--publish] [--expect N] [--silence-s S]
    python -m headrace.comm.store --fetch-recipe
    python -m headrace.comm.store --join ROLE=COUNT ...
    python -m headrace.comm.store --refuse TEXT

The first supervisor starts this process. Its first line on stdout is `store HOST:PORT`. With `--publish` it also puts the
address under a key of torchrun's own store, where `find_address` of the other processes finds it; `HEADRACE_STORE=HOST:PORT`
in the environment overrides that. The process exits with 0 on SIGQUIT, or once at least `--expect` members (default 1) have
joined and each of them has left or has been silent for `--silence-s` seconds (default 60). It ignores SIGINT and SIGTERM:
terminals and schedulers send them to all processes, and the store has to end last. With `--end-with-parent` it ends when its parent is gone.

The store also has the run's recipe, signed, for hosts that share no files with the first. The second form prints it. The third takes
numbers for the processes of a host that joins a running job. A process that cannot join the run says so to the store, as the
last form does; the store then prints the text and ends with 2.

The store has no authentication: any client that reaches the port can act as a member. So a trusted network is required against
denial of service; mailboxes refuse forged messages.
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast

from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from .environment import ADDRESS_FILE, RECIPE_KEY, SUMMARY_KEY
from .errors import SettingError, StoreGone
from .links.host import join_address, listen, split_address
from .waits import Wait, waiting

_ADDRESS_KEY = "headrace/store"
_ATTEMPT_S = 5.0
_RETRY_S = 0.1
_REFUSAL_KEY = "headrace/refusal"
_FIND_S = _CLONE_S = 120.0
_NO_VALUE = "headrace: no value"
ROSTER = "fleet/roster"
"""Key of the names of all members that ever joined, one on each line, in the order of their first joining."""


class StoreClient(Protocol):
    """The methods of `TCPStore` in use, since its type stubs lack half of them. Each may raise `DistError`."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    def set_timeout(self, timeout: timedelta, /) -> None: ...
    def set(self, key: str, value: bytes | str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def append(self, key: str, value: bytes | str, /) -> None: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
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
    """A client of the store at "host:port". A thread that waits on it needs a `clone_store`. Raises `StoreGone`.

    A host that does not answer is tried again until the deadline. Without `is_started`, so is one that refuses the connection.
    """
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise SettingError(f"the store's address (HEADRACE_STORE): {error}") from error
    with waiting(f"store {address}", "a connection", deadline_s) as wait:
        while (client := _try_to_connect(host, port, wait, is_started)) is None:
            time.sleep(min(_RETRY_S, wait.remaining_s))
    return _patient(client)


def clone_store(store: StoreClient) -> StoreClient:
    """Another client of the same store, for a thread that waits on it. Raises `StoreGone`."""
    return connect_store(join_address(store.host, store.port), _CLONE_S)


def read_value(store: StoreClient, key: str) -> bytes | None:
    """The value of `key` at this moment, or None: one request, where a `get` would wait for a key deleted since a `check`."""
    # An absent key stays absent: the store then returns the value that was expected.
    value = store.compare_set(key, _NO_VALUE, _NO_VALUE)
    return None if value == _NO_VALUE.encode() else value


def _patient(client: TCPStore) -> StoreClient:
    store = cast(StoreClient, client)
    store.set_timeout(timedelta(days=1))
    return store


def _try_to_connect(host: str, port: int, wait: Wait, is_started: bool) -> TCPStore | None:
    """A client, or None to try again. Raises `StoreGone` past the deadline, and where the store has ended.

    A TCPStore client alone would try until its timeout, even where the port refuses connections.
    """
    seconds = min(_ATTEMPT_S, wait.remaining_s + 0.1)
    try:
        socket.create_connection((host, port), seconds).close()
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    except (OSError, DistError) as error:
        if (is_started and isinstance(error, ConnectionRefusedError)) or not wait.remaining_s:
            raise StoreGone(f"no store answers at {join_address(host, port)}: {error}") from error
    return None


def _publish_address(address: str) -> None:
    """Put the fleet store's address into the store of this torchrun, for `find_address`."""
    store = _torchrun_store(deadline_s=30)
    store.set(_ADDRESS_KEY, address)
    store.check([_ADDRESS_KEY])


def find_address(deadline_s: float) -> str:
    """The fleet store's address: `HEADRACE_STORE` if set, else the address in torchrun's store."""
    if address := os.environ.get("HEADRACE_STORE"):
        return address
    found = _wait_for_value(_torchrun_store(deadline_s), _ADDRESS_KEY, "the fleet store's address", deadline_s)
    return found.decode()


def fetch_recipe(address: str, deadline_s: float) -> bytes:
    """The signed recipe (`RECIPE_KEY`) of the run whose store is at `address`. Raises `StoreGone`."""
    return _wait_for_value(connect_store(address, deadline_s), RECIPE_KEY, "the recipe", deadline_s)


def take_numbers(address: str, counts: Mapping[str, int]) -> dict[str, int]:
    """Role -> how many processes of it have joined the run before these, which no other caller gets. Raises `StoreGone`."""
    store = connect_store(address, _FIND_S)
    return {role: store.add(f"fleet/joined/{role}", count) - count for role, count in counts.items()}


def refuse_run(address: str, reason: str) -> None:
    """Tell the store that a process cannot join the run, which ends for that reason. Raises `StoreGone`."""
    store = connect_store(address, _FIND_S)
    store.set(_REFUSAL_KEY, reason)
    store.check([_REFUSAL_KEY])


def publish_summary(address: str, signed: bytes) -> None:
    """Give the summary of a run that has ended to the processes of all hosts. Raises `StoreGone`."""
    store = connect_store(address, _FIND_S)
    store.set(SUMMARY_KEY, signed)
    store.check([SUMMARY_KEY])


def wait_for_summary(address: str, is_coming: Callable[[], bool], deadline_s: float) -> bytes:
    """The signed summary of the run; empty if it is not there and not `is_coming`. Raises `StoreGone`."""
    store = connect_store(address, deadline_s)
    with waiting("hub", "the run's summary", deadline_s) as wait:
        while not store.check([SUMMARY_KEY]):
            if not is_coming() or not wait.remaining_s:
                return b""
            time.sleep(_RETRY_S)
    return store.get(SUMMARY_KEY)


def _wait_for_value(store: StoreClient, key: str, what: str, deadline_s: float) -> bytes:
    try:
        with waiting("the first supervisor", what, deadline_s) as wait:
            wait.until(lambda: store.check([key]), interval_s=0.02)
        return store.get(key)
    except DistError as error:
        raise StoreGone(f"the store ended before it had {what}: {error}") from error


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
        roster = store.get(ROSTER).decode(errors="replace").split() if store.check([ROSTER]) else []
        names = [name for name in dict.fromkeys(roster) if store.check([f"fleet/beat/{name}"])]
        num_present = 0
        for name in names:
            beat = store.get(f"fleet/beat/{name}")
            if beat != self._beats.get(name, (b"", 0.0))[0]:
                self._beats[name] = (beat, now)
            has_left = store.check([f"fleet/left/{name}"])
            num_present += not has_left and now - self._beats[name][1] < self._silence_s
        return len(names), num_present


def _serve(arguments: argparse.Namespace) -> None:
    """Run the store until its members have left. Waits for them by its own clock; woken by SIGQUIT."""
    ended = threading.Event()
    signal.signal(signal.SIGQUIT, lambda *_: ended.set())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    hosted = StoreServer(arguments.interface, arguments.port)
    print(f"store {hosted.address}", flush=True)
    if arguments.recipe is not None:
        (arguments.recipe.parent / ADDRESS_FILE).write_text(hosted.address)
        from .signing import sign_entry

        secret = os.environ["HEADRACE_SECRET"].encode()
        hosted.store.set(RECIPE_KEY, sign_entry(secret, RECIPE_KEY, arguments.recipe.read_bytes()))
    if arguments.publish:
        _publish_address(hosted.address)
    attendance = _Attendance(arguments.silence_s)
    while not ended.wait(0.1):
        num_joined, num_present = attendance.present(hosted.store, time.monotonic())
        if num_joined >= arguments.expect and num_present == 0:
            return
        if arguments.end_with_parent and os.getppid() != parent:
            return
        if hosted.store.check([_REFUSAL_KEY]):
            sys.stderr.write(f"{hosted.store.get(_REFUSAL_KEY).decode()}\n")
            sys.stderr.flush()
            os._exit(2)  # at once: its supervisor has to see this end before that of a member


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
    parser.add_argument("--recipe", type=Path, help="file with the recipe, which is signed with HEADRACE_SECRET")
    parser.add_argument("--fetch-recipe", action="store_true", help="print the signed recipe of the run instead")
    parser.add_argument(
        "--join", metavar="ROLE=COUNT", nargs="+", help="take numbers, and print how many were taken before, as JSON"
    )
    parser.add_argument("--refuse", metavar="TEXT", help="end the run for this reason instead")
    arguments = parser.parse_args(argv)
    if arguments.fetch_recipe:
        sys.stdout.buffer.write(fetch_recipe(find_address(_FIND_S), _FIND_S))
    elif arguments.join:
        counts = {role: int(count) for role, _, count in (word.partition("=") for word in arguments.join)}
        print(json.dumps(take_numbers(find_address(_FIND_S), counts)))
    elif arguments.refuse is not None:
        refuse_run(find_address(_FIND_S), arguments.refuse)
    else:
        _serve(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
