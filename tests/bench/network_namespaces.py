"""A cluster in network namespaces: one shaped duplex link per host on one switch. Needs root and iproute2.

    python -m bench.network_namespaces chain PREFIX NUM_HOSTS NUM_BYTES
    python -m bench.network_namespaces stall PREFIX NUM_HOSTS NUM_BYTES
    python -m bench.network_namespaces gloo RANK NUM_HOSTS STORE NUM_BYTES

run inside the namespaces: the last on each host, the others on host 0. They print `seconds SECONDS`, the second `stall SECONDS` before.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from headrace.comm.links.process_group import meeting_store
from headrace.comm.store.client import StoreClient
from headrace.comm.store.server import StoreServer

from .harness import BenchProcess, best_seconds, command

_REPEATS = 2
_STEPS, _STEP_S = 10, 0.5
_DEADLINE = timedelta(seconds=120)


def can_shape() -> bool:
    """Whether this process can create namespaces and shaped links."""
    return os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc", "unshare")))


class Network:
    """Hosts 0 to `num_hosts` - 1, each with a link of `bytes_per_s`, for the length of a `with` block."""

    def __init__(self, num_hosts: int, bytes_per_s: float) -> None:
        self._prefix = f"headrace{os.getpid()}-"
        self._num_hosts = num_hosts
        self._rate = f"{int(bytes_per_s * 8)}bit"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            switch = self._add("switch", stack)
            _run(f"ip -n {switch} link add bridge type bridge")
            _run(f"ip -n {switch} link set bridge up")
            for host in range(self._num_hosts):
                self._connect(self._add(host, stack), host, switch)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def chain_seconds(self, num_hosts: int, num_bytes: int) -> float:
        """Seconds that our chain takes to push a version from host 0 to all others."""
        return self._slowest([(0, command("network_namespaces", "chain", self._prefix, num_hosts, num_bytes))])

    def push_seconds(self, num_hosts: int, num_bytes: int) -> tuple[float, float]:
        """Seconds of an actor's stall beside a relay of its host, with pushes faster than the links, and of one push to all hosts."""
        words = command("network_namespaces", "stall", self._prefix, num_hosts, num_bytes)
        with BenchProcess([*_enter(self._prefix, 0), *words]) as child:
            stall_s, push_s = (float(child.line(name).split()[1]) for name in ("stall", "seconds"))
        return stall_s, push_s

    def gloo_seconds(self, num_hosts: int, num_bytes: int) -> float:
        """Seconds that Gloo's broadcast takes for the same."""
        store = f"{_address(0)}:29517"  # in our own namespaces every port is free
        words = [command("network_namespaces", "gloo", rank, num_hosts, store, num_bytes) for rank in range(num_hosts)]
        return self._slowest(list(enumerate(words)))

    def _slowest(self, commands: list[tuple[int, list[str]]]) -> float:
        with ExitStack() as stack:
            children = [
                stack.enter_context(BenchProcess([*_enter(self._prefix, host), *words])) for host, words in commands
            ]
            return max(float(child.line("seconds").split()[1]) for child in children)

    def _add(self, host: int | str, stack: ExitStack) -> str:
        name = f"{self._prefix}{host}"
        _run(f"ip netns add {name}")
        stack.callback(_run, f"ip netns del {name}")
        return name

    def _connect(self, name: str, host: int, switch: str) -> None:
        _run(f"ip link add port{host} netns {switch} type veth peer name net netns {name}")
        _run(f"ip -n {switch} link set port{host} master bridge up")
        _run(f"ip -n {name} addr add {_address(host)}/24 dev net")
        for device in ("lo", "net"):
            _run(f"ip -n {name} link set {device} up")
        shaping = f"root tbf rate {self._rate} burst 128kb latency 20ms"
        _run(f"tc -n {name} qdisc add dev net {shaping}")
        _run(f"tc -n {switch} qdisc add dev port{host} {shaping}")


def _enter(prefix: str, host: int) -> list[str]:
    """The words before a command that run it on a host: a host has process ids of its own."""
    separate = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["ip", "netns", "exec", f"{prefix}{host}", *separate]


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _run(words: str) -> None:
    subprocess.run(words.split(), check=True)


def _chain(prefix: str, num_hosts: str, num_bytes: str) -> None:
    from .relay_cluster import RelayCluster  # a Gloo peer needs none of the relay's modules

    places = [(_enter(prefix, host), _address(host)) for host in range(1, int(num_hosts))]
    with RelayCluster(int(num_hosts) - 1, int(num_bytes), interface=_address(0), places=places) as cluster:
        cluster.push()
        print("seconds", min(cluster.push() for _ in range(_REPEATS)), flush=True)


def _stall(prefix: str, num_hosts: str, num_bytes: str) -> None:
    from .relay_cluster import RelayCluster

    others = [(_enter(prefix, host), _address(host)) for host in range(1, int(num_hosts))]
    places = [([], _address(0)), *others]
    with RelayCluster(len(places), int(num_bytes), places, interface=_address(0), link="auto") as cluster:
        cluster.push()
        stalls: list[float] = []
        for _ in range(_STEPS):
            stalls.append(cluster.publish())
            time.sleep(_STEP_S)
        cluster.wait_for_relays()
        print("stall", statistics.median(stalls), flush=True)
        print("seconds", min(cluster.push() for _ in range(_REPEATS)), flush=True)


def _gloo(rank: str, num_hosts: str, store_address: str, num_bytes: str) -> None:
    host, port = store_address.split(":")
    hosted = StoreServer(host, b"", int(port)).start() if rank == "0" else None
    client = StoreClient.connect(store_address, b"", 60, is_started=False)
    store: Any = meeting_store(client, _address(int(rank)), "gloo", 60, is_host=rank == "0")
    options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_address(int(rank)))]
    options._timeout = _DEADLINE
    group: Any = dist.ProcessGroupGloo(store, int(rank), int(num_hosts), options)  # pyright: ignore
    version = torch.zeros(int(num_bytes), dtype=torch.uint8)

    def broadcast() -> None:
        group.broadcast([version], dist.BroadcastOptions()).wait(_DEADLINE)
        group.barrier().wait(_DEADLINE)

    group.barrier().wait(_DEADLINE)
    print("seconds", *best_seconds(broadcast, repeats=_REPEATS), flush=True)
    client.close()
    if hosted is not None:
        hosted.close()


if __name__ == "__main__":
    {"chain": _chain, "stall": _stall, "gloo": _gloo}[sys.argv[1]](*sys.argv[2:])
