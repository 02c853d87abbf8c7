"""Hosts on one machine: namespaces of network, processes, names and mounts, and a switch with a cable to each. Needs root.

A host has an address, a name, a process tree, /tmp and /dev/shm of its own. Of the machine's /tmp it sees only the shared
folder, the checkout and its environment; the rest of the file system is common. Everything ends with `close`, which a test
gives to `at_end`.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

from support.source_tree import ROOT

from headrace.comm.process_tree import end_with_parent

PATIENCE_S = 60.0
_serials = itertools.count()

_BOOT = """
hostname "$1"
shift
for own in /tmp /dev/shm; do
    mount --rbind $own /mnt
    mount -t tmpfs tmpfs $own
    for kept; do
        case $kept in
        $own/*) mkdir -p "$kept"; mount --rbind "/mnt${kept#$own}" "$kept" ;;
        esac
    done
    umount --lazy /mnt
done
echo up
exec sleep infinity
"""
"""Arguments: the host's name, then the folders below /tmp and /dev/shm that it shares with the machine."""


@cache
def obstacle() -> str:
    """Why hosts cannot be made on this machine; empty if they can."""
    if os.geteuid() != 0:
        return "hosts in namespaces need root"
    if missing := [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]:
        return f"hosts in namespaces need {', '.join(missing)}"
    name = f"headrace{os.getpid()}-probe"
    try:
        _run(f"ip netns add {name}")
        _run(
            f"ip netns exec {name} unshare --uts --ipc --pid --mount --fork --mount-proc mount -t tmpfs tmpfs /dev/shm"
        )
        _run(f"ip -n {name} link add bridge type bridge")
    except subprocess.CalledProcessError as error:
        return f"hosts in namespaces cannot be made here: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


class Host:
    """One host: `address` is how the others reach it."""

    def __init__(self, namespace: str, name: str, address: str, port: str, shared: Path) -> None:
        self.name = name
        self.address = address
        self._namespace = namespace
        self._port = port
        words = ["--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "sh", "-e", "-c"]
        kept = sorted({str(shared), str(ROOT), str(Path.cwd()), sys.prefix, sys.base_prefix})  # the outer of two first
        parent = os.getpid()
        self._outer = subprocess.Popen(
            ["ip", "netns", "exec", namespace, "unshare", *words, _BOOT, "sh", name, *kept],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=lambda: end_with_parent(signal.SIGKILL, parent),  # noqa: PLW1509 - it calls the kernel alone
        )
        assert self._outer.stdout is not None and self._outer.stdout.readline() == "up\n", f"{name} did not start"
        self._outer.stdout.close()
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        self._init = int(children[0])
        self._started: list[subprocess.Popen[str]] = []

    def command(self, words: Sequence[str]) -> list[str]:
        """The words of a command line that runs on this host."""
        return ["nsenter", "--target", str(self._init), "--net", "--uts", "--ipc", "--pid", "--mount", "--", *words]

    def start(self, words: Sequence[str], output: Path, **environment: str) -> subprocess.Popen[str]:
        """Start a program on this host, in this process's working directory; its output goes to a file."""
        here = ["env", f"--chdir={Path.cwd()}", *(f"{key}={value}" for key, value in environment.items())]
        with output.open("w") as stream:
            process = subprocess.Popen(
                self.command([*here, *words]), stdout=stream, stderr=subprocess.STDOUT, text=True
            )
        self._started.append(process)
        return process

    def path(self, path: str | Path) -> Path:
        """A path of this host, as this process sees it."""
        return Path(f"/proc/{self._init}/root{path}")

    def cut(self) -> None:
        """Pull the network cable."""
        _run(f"ip -n {self._namespace.rpartition('-')[0]}-switch link set {self._port} down")

    def mend(self) -> None:
        """Plug the network cable in again."""
        _run(f"ip -n {self._namespace.rpartition('-')[0]}-switch link set {self._port} up")

    def kill(self) -> None:
        """End every process of the host at once."""
        with suppress(ProcessLookupError):
            os.kill(self._init, signal.SIGKILL)
        self._outer.wait(PATIENCE_S)
        for process in self._started:
            process.wait(PATIENCE_S)

    def processes(self) -> list[str]:
        """Command lines of the programs that run on this host, without its first process."""
        namespace = os.stat(f"/proc/{self._init}/ns/pid").st_ino
        found: list[str] = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if int(folder.name) != self._init and (folder / "ns/pid").stat().st_ino == namespace:
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return [line for line in found if line]


class Cluster:
    """Hosts 0 to `num_hosts` - 1 on one switch, each with a link of `bits_per_s` where given.

    shared: a folder that all hosts see under its own path.
    """

    def __init__(self, num_hosts: int, shared: Path, bits_per_s: int | None = None) -> None:
        self._stack = ExitStack()
        self._prefix = f"headrace{os.getpid()}.{next(_serials)}"
        self.hosts: list[Host] = []
        with ExitStack() as stack:
            switch = self._add("switch", stack)
            _run(f"ip -n {switch} link add bridge type bridge")
            _run(f"ip -n {switch} link set bridge up")
            for number in range(num_hosts):
                self._connect(number, switch, bits_per_s, stack)
                host = Host(f"{self._prefix}-{number}", f"host{number}", _address(number), f"port{number}", shared)
                stack.callback(host.kill)
                self.hosts.append(host)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """End all hosts; closing twice is allowed."""
        self._stack.close()

    def _add(self, name: str, stack: ExitStack) -> str:
        namespace = f"{self._prefix}-{name}"
        _run(f"ip netns add {namespace}")
        stack.callback(_run, f"ip netns del {namespace}")
        return namespace

    def _connect(self, number: int, switch: str, bits_per_s: int | None, stack: ExitStack) -> None:
        namespace = self._add(str(number), stack)
        _run(f"ip link add port{number} netns {switch} type veth peer name net0 netns {namespace}")
        _run(f"ip -n {switch} link set port{number} master bridge up")
        _run(f"ip -n {namespace} addr add {_address(number)}/24 dev net0")
        for device in ("lo", "net0"):
            _run(f"ip -n {namespace} link set {device} up")
        if bits_per_s is not None:
            shaping = f"root tbf rate {bits_per_s}bit burst 128kb latency 20ms"
            _run(f"tc -n {namespace} qdisc add dev net0 {shaping}")
            _run(f"tc -n {switch} qdisc add dev port{number} {shaping}")


def interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C for a program on a host, the child of the process that entered the host."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGINT)


def wait_for_exits(processes: Sequence[subprocess.Popen[str]], patience_s: float) -> list[int | None]:
    """Exit codes, None for each process that still runs after `patience_s` seconds in all."""
    deadline = time.monotonic() + patience_s
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    return [process.poll() for process in processes]


def _address(number: int) -> str:
    return f"10.78.0.{number + 1}"


def _run(words: str) -> None:
    subprocess.run(words.split(), check=True, capture_output=True, text=True)
