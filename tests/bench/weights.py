"""The weights: copies on one host, the actor's stall, the chain of relays and its repair.

Hosts are processes on this machine. Where the network is measured, their links are limited to a pace.
"""

import signal
import statistics
import time

import numpy as np

from headrace.launch.processes.child import print_message
from headrace.relay.weights.transfer import START_S, best_num_chunks, push_seconds

from .harness import Measurement, Options, best_seconds
from .network_namespaces import Network, can_shape
from .relay_cluster import RelayCluster

_PACE = 40e6
_PACED_BYTES = 64 << 20
# A dozen processes on few cores are scheduled late: the links must take far longer than that.
_SHAPED_PACE, _SHAPED_BYTES = 10e6, 64 << 20
_LAN_PACE, _LAN_HOSTS = 100e6 / 8, 4
_TCP_SHARE = 1448 / 1514
"""Of a frame on an Ethernet link, the share of a TCP stream's bytes."""
_CHUNKS = (64 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20)
_REPEATS = 5


def shm_copies(name: str, options: Options) -> list[Measurement]:
    """Push and pull through a relay's segment on this host over `numpy.copyto` of the same bytes, in turns."""
    num_bytes = options.megabytes << 20
    source, into = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    with RelayCluster(1, num_bytes, link="shm") as cluster:
        reader, stalls, copies = cluster.reader(), [], []
        assert cluster.layout.num_bytes == num_bytes
        for _ in range(2 * _REPEATS):
            stalls.append(cluster.publish())
            cluster.wait_for_relays()
            copies += best_seconds(lambda: np.copyto(into, source), repeats=1)
            time.sleep(0.2)  # as in a training step, the version leaves meanwhile
        copy_s, pull_s, digest_s = best_seconds(
            lambda: np.copyto(into, source),
            lambda: reader.newest() and reader.pull(into, 60),
            lambda: cluster.layout.digest(into),
            repeats=4 * _REPEATS,
        )
    gigabytes = num_bytes / 1e9
    return [
        Measurement("shm-push", "numpy.copyto", gigabytes / min(stalls), "GB/s", min(copies) / min(stalls)),
        Measurement("shm-pull", "numpy.copyto", gigabytes / pull_s, "GB/s", copy_s / pull_s),
        Measurement("digest", "numpy.copyto", gigabytes / digest_s, "GB/s", copy_s / digest_s),
    ]


def actor_stall(name: str, options: Options) -> list[Measurement]:
    """The actor's stall with 6 relays over that with 1, on links limited to a pace."""
    stalls = {}
    for num_relays in (1, 6):
        with RelayCluster(num_relays, _PACED_BYTES, pace=_PACE) as cluster:
            cluster.push()
            timings = []
            for _ in range(_REPEATS):
                timings.append(cluster.publish())
                cluster.wait_for_relays()
            stalls[num_relays] = min(timings)
    return [Measurement(name, "1 relay", stalls[6] * 1e3, "ms", stalls[6] / stalls[1])]


def stopped_relay(name: str, options: Options) -> list[Measurement]:
    """Steps of 50 ms with a push after each while a relay is stopped: the 99th percentile over the median."""
    steps = []
    with RelayCluster(3, 4 << 20, pace=_PACE) as cluster:
        cluster.push()
        cluster.relays[1].process.send_signal(signal.SIGSTOP)
        for _ in range(100):
            started = time.monotonic()
            time.sleep(0.05)
            cluster.publish()
            steps.append(time.monotonic() - started)
        cluster.relays[1].process.send_signal(signal.SIGCONT)
    slowest, median = sorted(steps)[-2], statistics.median(steps)
    return [Measurement(name, "median step", slowest * 1e3, "ms", slowest / median)]


def chain(name: str, options: Options) -> list[Measurement]:
    """A push to 11 relays (12 hosts with the actor's) over one to a single relay, and over the model's time."""
    pair, all_hosts = _best_push(1, 3), _best_push(11, 3)
    num_chunks = best_num_chunks(12, _PACED_BYTES, 1 / _PACE, START_S)
    return [
        Measurement(name, "2 hosts", all_hosts, "s", all_hosts / pair),
        Measurement(name, "T(k) of the model", all_hosts, "s", all_hosts / _model_seconds(12, num_chunks)),
    ]


def chunk_sizes(name: str, options: Options) -> list[Measurement]:
    """A push to 5 relays with chunks of several sizes over the model's time, and with the chosen size over the best."""
    chosen = _best_push(5, _REPEATS)
    seconds = {chunk_bytes: _best_push(5, _REPEATS, chunk_bytes) for chunk_bytes in _CHUNKS}
    rows = [
        Measurement(
            f"chunks-{size >> 10}-KiB", "T(k) of the model", taken, "s", taken / _model_seconds(6, _PACED_BYTES / size)
        )
        for size, taken in seconds.items()
    ]
    return [*rows, Measurement("chunks-chosen", "best tried", chosen, "s", chosen / min(seconds.values()))]


def _best_push(num_relays: int, repeats: int, chunk_bytes: int | None = None) -> float:
    with RelayCluster(num_relays, _PACED_BYTES, pace=_PACE, chunk_bytes=chunk_bytes) as cluster:
        cluster.push()
        return min(cluster.push() for _ in range(repeats))


def _model_seconds(num_nodes: int, num_chunks: float) -> float:
    return push_seconds(num_nodes, _PACED_BYTES, num_chunks, 1 / _PACE, START_S)


def gloo_broadcast(name: str, options: Options) -> list[Measurement]:
    """Gloo's broadcast to 12 hosts over our chain, and the chain over one to 2, in shaped network namespaces."""
    if not can_shape():
        print_message(f"{name} is left out: shaped links need root, ip and tc")
        return []
    with Network(12, _SHAPED_PACE) as network:
        pair = network.chain_seconds(2, _SHAPED_BYTES)
        chain = network.chain_seconds(12, _SHAPED_BYTES)
        gloo = network.gloo_seconds(12, _SHAPED_BYTES)
    return [
        Measurement(name, "our chain", gloo, "s", gloo / chain),
        Measurement("chain-12-namespaces", "2 hosts", chain, "s", chain / pair),
    ]


def shaped_hosts(name: str, options: Options) -> list[Measurement]:
    """On hosts with links of 100 Mbit/s: the actor's stall over that on one host, and a push over the model's time."""
    if not can_shape():
        print_message(f"{name} is left out: shaped links need root, ip, tc and unshare")
        return []
    with Network(_LAN_HOSTS, _LAN_PACE) as network:
        alone_s, _ = network.push_seconds(1, _SHAPED_BYTES)
        stall_s, push_s = network.push_seconds(_LAN_HOSTS, _SHAPED_BYTES)
    byte_s = 1 / (_LAN_PACE * _TCP_SHARE)
    num_chunks = best_num_chunks(_LAN_HOSTS, _SHAPED_BYTES, byte_s, START_S)
    model_s = push_seconds(_LAN_HOSTS, _SHAPED_BYTES, num_chunks, byte_s, START_S)
    return [
        Measurement("shaped-stall", "1 host", stall_s * 1e3, "ms", stall_s / alone_s),
        Measurement("shaped-push", "T(k) of the model", push_s, "s", push_s / model_s),
    ]


def relay_killed(name: str, options: Options) -> list[Measurement]:
    """A push during which a relay is killed, over an undisturbed one."""
    with RelayCluster(5, _PACED_BYTES, pace=_PACE) as cluster:
        cluster.push()
        unbroken = min(cluster.push() for _ in range(2))
        started = time.monotonic()
        cluster.publish()
        time.sleep(unbroken / 2)
        cluster.relays[2].process.kill()
        broken = cluster.wait_for_relays(frozenset({2})) - started
    return [Measurement(name, "unbroken", broken, "s", broken / unbroken)]
