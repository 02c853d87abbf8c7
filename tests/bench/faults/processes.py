"""The processes of one run on this machine: their names, trees, signals, and the resources that they hold.

A process belongs to the run if its environment has the run's failpoint socket, which every process that it starts inherits.
"""

import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.comm.trace import FAILPOINTS

_ROLE = re.compile(r"--role (\w+) --index (\d+)")
_MODULE = re.compile(r"-m ([\w.]+)")
_NAMES = {
    "torch.distributed.run": "torchrun",
    "headrace.launch.run": "launcher",
    "headrace.comm.store": "store",
    "headrace.rollout.rewards.worker": "reward",
}


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the run. Supervisors and guardians are named by another process, as `supervisor of rollout-0`."""

    pid: int
    parent: int
    name: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Resident megabytes, open files and threads of a process."""

    megabytes: float
    files: int
    threads: int


def processes_of(address: Path) -> dict[int, Process]:
    """All living processes of the run with this failpoint socket, by their id."""
    marker = f"{FAILPOINTS}={address}".encode()
    found: dict[int, Process] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):  # it has ended meanwhile, or belongs to another user
            if marker not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            found[int(folder.name)] = Process(int(folder.name), parent, _name_of(words))
    return _with_parents(found)


def _name_of(words: str) -> str:
    if role := _ROLE.search(words):
        return "hub" if role[1] == "hub" else f"{role[1]}-{role[2]}"
    modules = _MODULE.findall(words)
    return next((_NAMES[module] for module in modules if module in _NAMES), "helper")


def _with_parents(found: dict[int, Process]) -> dict[int, Process]:
    """Name each supervisor by its role, where of two children the one that is not the hub counts, and guardians of rewards."""
    named = dict(found)
    for process in found.values():
        parent = found.get(process.parent)
        if parent is not None and parent.name == "launcher" and re.fullmatch(r"\w+-\d+", process.name):
            named[parent.pid] = Process(parent.pid, parent.parent, f"supervisor of {process.name}")
        elif parent is not None and parent.name == process.name == "reward":
            named[parent.pid] = Process(parent.pid, parent.parent, "guardian of reward")
    return named


def find(address: Path, name: str) -> list[int]:
    """The ids of a target's processes: a process by its name, `host of NAME` for its supervisor and all below that."""
    processes = processes_of(address)
    if not name.startswith("host of "):
        return [process.pid for process in processes.values() if process.name == name]
    top = f"supervisor of {name.removeprefix('host of ')}"
    tree = [process.pid for process in processes.values() if process.name == top]
    for pid in tree:
        tree += [process.pid for process in processes.values() if process.parent == pid]
    return tree


def send(pids: Iterable[int], number: signal.Signals) -> int:
    """Send a signal; returns to how many processes, the others have ended."""
    count = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            count += 1
    return count


def started_at(pid: int) -> float:
    """When a process started, on the wall clock. Raises OSError if it has ended."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime_s + int(words[19]) / os.sysconf("SC_CLK_TCK")


def usage_of(pid: int) -> Usage | None:
    """The resources of a process; None if it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        pages = int((folder / "statm").read_text().split()[1])
        files, threads = len(os.listdir(folder / "fd")), len(os.listdir(folder / "task"))
    except OSError:
        return None
    return Usage(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, files, threads)
