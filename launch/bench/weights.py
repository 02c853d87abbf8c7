"""The benchmark of the weights: same-host copies, the actor's stall, the chain, its repair.

    python -m headrace.launch.bench.weights [--json FILE] [--only WORKLOAD ...] [--megabytes N]

Hosts are processes on this machine, their links held to a pace where the network is what is measured. Every figure is set
against a peer measured in the same run.
"""

import os
import signal
import statistics
import subprocess
import sys
import time

import numpy as np

from ...relay.chunks import START_S, best_num_chunks, push_seconds
from .harness import HEADING, Row, Workload, best_seconds, parse, run, write_json
from .network_namespaces import Network, can_shape, chain_seconds, gloo_seconds
from .relay_cluster import ENVIRONMENT, Hosts

_PACE = 40e6
_PACED_BYTES = 64 << 20
# A dozen processes on few cores wake each other late: the links must take far longer than that.
_SHAPED_PACE, _SHAPED_BYTES = 10e6, 64 << 20
_CHUNKS = (64 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20)
_REPEATS = 5


def shm_copies(num_bytes: int) -> list[Row]:
    """Push and pull through a relay's segment on this host, against `numpy.copyto` of the same bytes, in turns."""
    source, into = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    with Hosts(1, num_bytes, link="shm") as hosts:
        reader, stalls, copies = hosts.reader(), [], []
        assert hosts.layout.num_bytes == num_bytes
        for _ in range(2 * _REPEATS):
            stalls.append(hosts.publish())
            hosts.wait()
            copies += best_seconds(lambda: np.copyto(into, source), repeats=1)
            time.sleep(0.2)  # the next slot is claimed meanwhile, as it is in a training step
        copy_s, pull_s, digest_s = best_seconds(
            lambda: np.copyto(into, source),
            lambda: reader.newest() and reader.pull(into, 60),
            lambda: hosts.layout.digest(into),
            repeats=4 * _REPEATS,
        )
    gigabytes = num_bytes / 1e9
    return [
        Row("shm-push", "numpy.copyto", gigabytes / min(stalls), "GB/s", min(copies) / min(stalls)),
        Row("shm-pull", "numpy.copyto", gigabytes / pull_s, "GB/s", copy_s / pull_s),
        Row("digest", "numpy.copyto", gigabytes / digest_s, "GB/s", copy_s / digest_s),
    ]


def actor_stall(num_bytes: int) -> list[Row]:
    """The actor's stall with 6 relays against that with 1, links held to a pace."""
    stalls = {}
    for num_relays in (1, 6):
        with Hosts(num_relays, _PACED_BYTES, pace=_PACE) as hosts:
            hosts.push()
            timings = []
            for _ in range(_REPEATS):
                timings.append(hosts.publish())
                hosts.wait()
            stalls[num_relays] = min(timings)
    return [Row("actor-stall-6-relays", "1 relay", stalls[6] * 1e3, "ms", stalls[6] / stalls[1])]


def stopped_relay(num_bytes: int) -> list[Row]:
    """Steps of 50 ms with a push after each while a relay is stopped: the slowest of a hundred against the median."""
    steps = []
    with Hosts(3, 4 << 20, pace=_PACE) as hosts:
        hosts.push()
        hosts.relays[1].send_signal(signal.SIGSTOP)
        for _ in range(100):
            started = time.monotonic()
            time.sleep(0.05)
            hosts.publish()
            steps.append(time.monotonic() - started)
    slowest, median = sorted(steps)[-2], statistics.median(steps)
    return [Row("step-p99-relay-stopped", "median step", slowest * 1e3, "ms", slowest / median)]


def chain(num_bytes: int) -> list[Row]:
    """A push to 11 relays (12 hosts with the actor's) against one to a single relay, and against the model."""
    seconds = {}
    for num_relays in (1, 11):
        with Hosts(num_relays, _PACED_BYTES, pace=_PACE) as hosts:
            hosts.push()
            seconds[num_relays] = min(hosts.push() for _ in range(3))
    model = {n: _model_seconds(n + 1) for n in seconds}
    return [
        Row("chain-12-hosts", "2 hosts", seconds[11], "s", seconds[11] / seconds[1]),
        Row("chain-12-hosts", "T(k) of the model", seconds[11], "s", seconds[11] / model[11]),
    ]


def chunk_sizes(num_bytes: int) -> list[Row]:
    """A push to 5 relays with chunks of several sizes against the model, and with the chosen size against the best."""
    seconds = {}
    for chunk_bytes in (0, *_CHUNKS):
        with Hosts(5, _PACED_BYTES, pace=_PACE, chunk_bytes=chunk_bytes) as hosts:
            hosts.push()
            seconds[chunk_bytes] = min(hosts.push() for _ in range(_REPEATS))
    chosen, rows = seconds.pop(0), []
    for chunk_bytes, taken in seconds.items():
        model = push_seconds(6, _PACED_BYTES, _PACED_BYTES / chunk_bytes, 1 / _PACE, START_S)
        rows.append(Row(f"chunks-{chunk_bytes >> 10}-KiB", "T(k) of the model", taken, "s", taken / model))
    return [*rows, Row("chunks-chosen", "best tried", chosen, "s", chosen / min(seconds.values()))]


def gloo_broadcast(num_bytes: int) -> list[Row]:
    """Gloo's broadcast to 12 hosts against our chain, and the chain against one to 2, in shaped network namespaces."""
    if not can_shape():
        sys.stderr.write("gloo-broadcast-12-hosts: left out, shaped links need root, ip and tc\n")
        return []
    with Network(12, _SHAPED_PACE) as network:
        pair = chain_seconds(network, 2, _SHAPED_BYTES)
        chain = chain_seconds(network, 12, _SHAPED_BYTES)
        gloo = gloo_seconds(network, 12, _SHAPED_BYTES)
    return [
        Row("gloo-broadcast-12-hosts", "our chain", gloo, "s", gloo / chain),
        Row("chain-12-namespaces", "2 hosts", chain, "s", chain / pair),
    ]


def relay_killed(num_bytes: int) -> list[Row]:
    """A push in whose middle a relay is killed, against an unbroken one."""
    with Hosts(5, _PACED_BYTES, pace=_PACE) as hosts:
        hosts.push()
        unbroken = min(hosts.push() for _ in range(2))
        started = time.monotonic()
        hosts.publish()
        time.sleep(unbroken / 2)
        hosts.relays[2].kill()
        broken = hosts.wait(frozenset({2})) - started
    return [Row("push-with-relay-killed", "unbroken", broken, "s", broken / unbroken)]


def _model_seconds(num_nodes: int) -> float:
    chunks = best_num_chunks(num_nodes, _PACED_BYTES, 1 / _PACE, START_S)
    return push_seconds(num_nodes, _PACED_BYTES, chunks, 1 / _PACE, START_S)


WORKLOADS: dict[str, Workload] = {
    "shm-copies": shm_copies,
    "actor-stall-6-relays": actor_stall,
    "step-p99-relay-stopped": stopped_relay,
    "chain-12-hosts": chain,
    "chunk-sizes": chunk_sizes,
    "push-with-relay-killed": relay_killed,
    "gloo-broadcast-12-hosts": gloo_broadcast,
}


def main(argv: list[str]) -> None:
    """Run the workloads asked for, print the table."""
    if ENVIRONMENT.items() - os.environ.items():
        again = [sys.executable, "-m", "headrace.launch.bench.weights", *argv]
        sys.exit(subprocess.run(again, env={**os.environ, **ENVIRONMENT}, check=False).returncode)
    arguments = parse("headrace.launch.bench.weights", argv, list(WORKLOADS))
    if not arguments.no_heading:
        print(HEADING, flush=True)
    rows = run(WORKLOADS, arguments.only or list(WORKLOADS), arguments.megabytes << 20)
    if arguments.json is not None:
        write_json(rows, arguments.json)


if __name__ == "__main__":
    main(sys.argv[1:])
