"""The address of the run's store, as the supervisors find it; their children have it in the environment."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from ...comm.environment import ADDRESS_FILE, STORE
from ...comm.errors import StoreGone, WaitTimeout
from ...comm.links.host import split_address
from ...comm.waits import Wait, waiting

FIND_S = 120.0
INTERRUPTED_S = 2.0
"""Seconds that an interrupted rank still waits: if the store is there, the run ends in order."""
STORE_ANSWER_S = 1.0
"""Seconds within which a store answers a connection."""


def start_id() -> str:
    """Tells this start of a run from earlier ones in its folder: torchrun's process, the parent of all ranks of a host, and how often
    it has started them again (--max-restarts).
    """
    parent = os.getppid()
    try:
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        began = ""
    return f"{parent}/{began}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def find_store(run_dir: Path) -> str:
    """The address: from the environment, on the first host from the run folder, on others from torchrun's store. Raises `StoreGone`.

    A signal that is pending and ends the run may have ended the first rank too: soon after it `KeyboardInterrupt` is raised.
    """
    if address := os.environ.get(STORE):
        return address
    is_first = os.environ.get("GROUP_RANK", "0") == "0"
    try:
        with waiting("the first supervisor", "the store's address", FIND_S) as wait:
            return _await_file(run_dir, wait) if is_first else _ask_torchrun(wait)
    except WaitTimeout as error:
        if _is_interrupted():
            raise KeyboardInterrupt from error
        raise StoreGone(f"the first rank has not given the address of the run's store within {FIND_S:g} s") from error


def _await_file(run_dir: Path, wait: Wait) -> str:
    start = start_id()
    return wait.until(lambda: read_address(run_dir, start) or _hurry(wait), interval_s=0.02)


def _ask_torchrun(wait: Wait) -> str:
    command = [sys.executable, "-m", "headrace.comm.store.rendezvous", "find"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as finder:
        try:
            wait.until(lambda: finder.poll() is not None or _hurry(wait), interval_s=0.02)
        except BaseException:
            finder.kill()
            raise
        address, errors = finder.communicate(timeout=FIND_S)
    if finder.returncode:
        raise StoreGone(errors.strip().rpartition("\n")[2] or "the store's address was not found")
    return address.strip()


def _hurry(wait: Wait) -> None:
    if _is_interrupted():
        wait.deadline_s = min(wait.deadline_s, wait.elapsed_s + INTERRUPTED_S)


def _is_interrupted() -> bool:
    return bool(signal.sigpending() & {signal.SIGINT, signal.SIGTERM})


def read_address(run_dir: Path, start: str) -> str:
    """The address that the store of this start of the run has written; empty if it has not."""
    try:
        address, found, *_ = [*(run_dir / ADDRESS_FILE).read_text().splitlines(), "", ""]
    except OSError:
        return ""
    return address if found == start else ""


def has_store_ended(address: str) -> bool:
    """Whether the run's store is no more; one that is frozen, or whose host does not answer, may come back.

    A store greets each connection. One that is being killed still takes some, until the kernel has closed its socket.
    """
    try:
        with socket.create_connection(split_address(address), STORE_ANSWER_S) as connection:
            return not connection.recv(1)
    except ConnectionError:
        return True
    except OSError:
        return False
