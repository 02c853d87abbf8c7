"""A cluster in network namespaces: one shaped link per host, both ways, on one switch. Needs root and iproute2.

    python -m headrace.launch.bench.network_namespaces chain PREFIX NUM_HOSTS NUM_BYTES
    python -m headrace.launch.bench.network_namespaces gloo PREFIX RANK NUM_HOSTS STORE NUM_BYTES

run inside the namespaces: the first on host 0, the second on each host.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from ...comm.store import StoreServer, connect_store
from .relay_cluster import Hosts

_REPEATS = 2


def can_shape() -> bool:
    """Whether namespaces and shaped links can be made here."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None


def enter(prefix: str, host: int) -> list[str]:
    """What to put before a command that is to run on a host."""
    return ["ip", "netns", "exec", f"{prefix}{host}"]


def address(host: int) -> str:
    """A host's address."""
    return f"10.77.0.{host + 1}"


class Network:
    """Hosts 0 to `num_hosts` - 1, each with a link of `bytes_per_s`; it ends with the `with` block."""

    def __init__(self, num_hosts: int, bytes_per_s: float) -> None:
        self.prefix = f"headrace{os.getpid()}-"
        self._num_hosts = num_hosts
        self._switch = f"{self.prefix}switch"
        self._rate = f"{int(bytes_per_s * 8)}bit"

    def __enter__(self) -> Self:
        _run(f"ip netns add {self._switch}")
        _run(f"ip -n {self._switch} link add bridge type bridge")
        _run(f"ip -n {self._switch} link set bridge up")
        for host in range(self._num_hosts):
            self._add(host)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in range(self._num_hosts):
            _run(f"ip netns del {self.prefix}{host}")
        _run(f"ip netns del {self._switch}")

    def _add(self, host: int) -> None:
        name = f"{self.prefix}{host}"
        _run(f"ip netns add {name}")
        _run(f"ip link add port{host} netns {self._switch} type veth peer name net netns {name}")
        _run(f"ip -n {self._switch} link set port{host} master bridge up")
        _run(f"ip -n {name} addr add {address(host)}/24 dev net")
        for device in ("lo", "net"):
            _run(f"ip -n {name} link set {device} up")
        shaping = f"root tbf rate {self._rate} burst 128kb latency 20ms"
        _run(f"tc -n {name} qdisc add dev net {shaping}")
        _run(f"tc -n {self._switch} qdisc add dev port{host} {shaping}")


def chain_seconds(network: Network, num_hosts: int, num_bytes: int) -> float:
    """Seconds that our chain takes to bring a version from host 0 to all others."""
    return _seconds_told_by([_command(network.prefix, 0, "chain", num_hosts, num_bytes)])


def gloo_seconds(network: Network, num_hosts: int, num_bytes: int) -> float:
    """Seconds that Gloo's broadcast takes for the same."""
    store = f"{address(0)}:29517"  # inside namespaces of our own no port is taken
    return _seconds_told_by(
        [_command(network.prefix, rank, "gloo", rank, num_hosts, store, num_bytes) for rank in range(num_hosts)]
    )


def _command(prefix: str, host: int, kind: str, *arguments: object) -> list[str]:
    words = [sys.executable, "-m", "headrace.launch.bench.network_namespaces", kind, prefix, *map(str, arguments)]
    return [*enter(prefix, host), *words]


def _seconds_told_by(commands: Sequence[Sequence[str]]) -> float:
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    told = [process.communicate(timeout=300)[0] for process in processes]
    return max(float(text.split()[-1]) for text in told)


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def _chain(prefix: str, num_hosts: str, num_bytes: str) -> None:
    places = [(enter(prefix, host), address(host)) for host in range(1, int(num_hosts))]
    with Hosts(int(num_hosts) - 1, int(num_bytes), interface=address(0), places=places) as hosts:
        hosts.push()
        print(min(hosts.push() for _ in range(_REPEATS)))


def _gloo(_prefix: str, rank: str, num_hosts: str, store_address: str, num_bytes: str) -> None:
    host, port = store_address.split(":")
    hosted = StoreServer(host, int(port)) if rank == "0" else None
    deadline, store = time.monotonic() + 60, None
    while store is None:
        try:
            store = connect_store(store_address, 10)
        except dist.DistError:
            assert time.monotonic() < deadline
    options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address(int(rank)))]
    options._timeout = timedelta(seconds=120)
    group: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), int(rank), int(num_hosts), options)  # pyright: ignore
    version, timings = torch.zeros(int(num_bytes), dtype=torch.uint8), []
    for _ in range(_REPEATS):
        group.barrier().wait()
        started = time.monotonic()
        group.broadcast([version], dist.BroadcastOptions()).wait()
        group.barrier().wait()
        timings.append(time.monotonic() - started)
    print(min(timings), flush=True)
    del group, hosted


if __name__ == "__main__":
    {"chain": _chain, "gloo": _gloo}[sys.argv[1]](*sys.argv[2:])
