"""The store's process, which the first supervisor starts.

    python -m headrace.comm.store [--interface ADDRESS] [--port N] [--recipe FILE [--start ID]] [--expect N] [--silence-s S] [--tls] [--publish]

It reads the run's secret from HEADRACE_SECRET and prints `store HOST:PORT` as its first line. With `--recipe` it serves the recipe to
all processes, and writes its address and the ID of the start into a file beside the recipe. With `--publish` it gives the address to
the other hosts through torchrun's store.

It exits with 0 on SIGQUIT, or once at least `--expect` members have joined and each of them has left or has been silent for
`--silence-s` seconds. It exits with 2 if a host refuses the run. It ignores SIGINT and SIGTERM: terminals and schedulers send them to
all processes, and the store has to end last.
"""

import argparse
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

from ..environment import ADDRESS_FILE, RECIPE_KEY, REFUSAL_KEY
from ..links.tls import TlsIdentity
from .server import StoreServer

_LOOK_S = 0.1
_SPARE_FILES = 64
"""Open files that the process needs besides one connection for each member."""


def main(argv: list[str]) -> int:
    """Run the store until its members have left; returns the exit code. Waits without a deadline; SIGQUIT ends the wait."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    ended = threading.Event()
    signal.signal(signal.SIGQUIT, lambda *_: ended.set())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if (most := _raise_file_limit()) < arguments.expect + _SPARE_FILES:
        return _refuse(
            f"the store needs an open file for each of {arguments.expect} processes, and its limit is {most} (ulimit -Hn)"
        )
    secret = os.environ.get("HEADRACE_SECRET", "").encode()
    tls = TlsIdentity() if arguments.tls else None
    server = StoreServer(arguments.interface, secret, arguments.port, tls, arguments.expect)
    if arguments.recipe is not None:
        server.state.values[RECIPE_KEY] = arguments.recipe.read_bytes()
        _write_address(arguments.recipe.parent / ADDRESS_FILE, server.address, arguments.start)
    server.start()
    print(f"store {server.address}", flush=True)
    rendezvous = _Rendezvous(server.address).start() if arguments.publish else None
    while not ended.wait(_LOOK_S):
        state = server.state
        if state.num_joined >= arguments.expect and not state.num_present(arguments.silence_s):
            break
        refusal = state.values.get(REFUSAL_KEY, b"").decode() or (rendezvous.refusal if rendezvous else "")
        if refusal:
            return _refuse(refusal)
    if rendezvous is not None:
        rendezvous.end()
    server.close()
    return 0


class _Rendezvous:
    """The process that writes the address to torchrun's store and watches there for a host that refuses the run."""

    def __init__(self, address: str) -> None:
        self.refusal = ""
        command = [sys.executable, "-m", "headrace.comm.store.rendezvous", "publish", address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self) -> "_Rendezvous":
        """Listen for a refusal."""
        threading.Thread(target=self._read, name="rendezvous", daemon=True).start()
        return self

    def end(self) -> None:
        """End the process by closing its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.refusal = self._process.stdout.readline().strip()


def _refuse(reason: str) -> int:
    """Exit at once, so that the supervisor sees this exit before that of a member."""
    sys.stderr.write(f"{reason}\n")
    sys.stderr.flush()
    os._exit(2)


def _raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit; returns it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def _write_address(path: Path, address: str, start: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(f"{address}\n{start}\n")
    new.replace(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m headrace.comm.store", description="The store of a run.")
    parser.add_argument("--interface", default="127.0.0.1", help="the one address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--recipe", type=Path, help="file with the recipe; the address is written beside it")
    parser.add_argument("--start", default="", help="ID of the start, the second line of the file with the address")
    parser.add_argument("--publish", action="store_true", help="make the address known through torchrun's store")
    parser.add_argument("--expect", type=int, default=1, help="members that must have joined before it may end")
    parser.add_argument("--silence-s", type=float, default=60.0, help="seconds of silence that count as having left")
    parser.add_argument("--tls", action="store_true", help="encrypt connections")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
