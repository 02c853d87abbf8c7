"""The lock of those who may still write copies of the training state: the next start of a run waits for them.

The launcher's lock ends with its host, while supervisors on other hosts still write what they have in memory.
"""

import fcntl
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from ...comm.disk import folder_bytes
from ...comm.waits import Wait, waiting
from .child import print_message

LOCK_FILE = "memory.lock"
COPIES = "memory"
"""The folder of the copies (`relay/weights/copies_on_disk.py`)."""
_POLL_S = 0.1


def lock_to_write(run_dir: Path) -> IO[bytes] | None:
    """A lock that this process shares with others that will write copies, until it is closed; None on a file system without locks."""
    with suppress(OSError):
        file = (run_dir / LOCK_FILE).open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise
        return file
    return None


def wait_for_writers(run_dir: Path, deadline_s: float, longest_s: float) -> None:
    """Wait until no process of an earlier start holds the lock; with a deadline, again for as long as the copies grow, but no longer than
    `longest_s` in all.

    A process that is not waited for any longer sees that the run has another start, and leaves no copy.
    """
    if _is_free(run_dir):
        return
    print_message("processes of the run before still write copies of the training state; the run waits for them")
    num_bytes = -1
    ends = time.monotonic() + longest_s
    while (size := folder_bytes(run_dir / COPIES)) > num_bytes and (left_s := ends - time.monotonic()) > 0:
        num_bytes = size
        whom, what = "the supervisors of the run before", "their copies of the training state"
        with waiting(whom, what, min(deadline_s, left_s)) as wait:
            if _becomes_free(run_dir, wait):
                return
    print_message("they have not ended in time; the run continues without their copies")


def _becomes_free(run_dir: Path, wait: Wait) -> bool:
    while wait.remaining_s:
        if _is_free(run_dir):
            return True
        time.sleep(min(_POLL_S, wait.remaining_s))
    return False


def _is_free(run_dir: Path) -> bool:
    """Whether no process holds the lock. Without locks no one is waited for."""
    if not (run_dir / LOCK_FILE).exists():
        return True
    with suppress(OSError), (run_dir / LOCK_FILE).open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
