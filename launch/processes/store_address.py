"""The address of the run's store, as the supervisors find it; their children have it in the environment."""

import os
import subprocess
import sys
from pathlib import Path

from ...comm.environment import ADDRESS_FILE, STORE
from ...comm.errors import StoreGone
from ...comm.waits import waiting

FIND_S = 120.0


def start_id() -> str:
    """Tells this start of a run from earlier ones in its folder: torchrun's process, the parent of all ranks of a host."""
    parent = os.getppid()
    try:
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        began = ""
    return f"{parent}/{began}"


def find_store(run_dir: Path) -> str:
    """The address: from the environment, on the first host from the run folder, on others from torchrun's store. Raises `StoreGone`."""
    if address := os.environ.get(STORE):
        return address
    if os.environ.get("GROUP_RANK", "0") == "0":
        with waiting("the first supervisor", "the store's address", FIND_S) as wait:
            return wait.until(lambda: read_address(run_dir), interval_s=0.02)
    command = [sys.executable, "-m", "headrace.comm.store.rendezvous", "find"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=2 * FIND_S, check=False)
    if found.returncode:
        raise StoreGone(found.stderr.strip().rpartition("\n")[2] or "the store's address was not found")
    return found.stdout.strip()


def read_address(run_dir: Path) -> str | None:
    """The address that the store of this start of the run has written, if it has."""
    try:
        address, start, *_ = [*(run_dir / ADDRESS_FILE).read_text().splitlines(), "", ""]
    except OSError:
        return None
    return address if start == start_id() else None
