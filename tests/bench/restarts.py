"""How long a process that was killed is away: from SIGKILL until the next one of its role works.

A run of a small policy, or of `--policy`, whose processes are killed in turns. It works again: a hub that has replayed its journal, a
relay that has announced its storage unit, a rollout to which the hub has leased rows, a trainer that has trained a step.
"""

import itertools
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from support.job import Job, child_of
from support.policies import tiny_policy

from headrace.comm.environment import ADDRESS_FILE
from headrace.comm.store.client import StoreClient
from headrace.comm.store.protocol import Changed, Watch
from headrace.launch.processes.secret import read_secret

from .harness import Measurement, Options

_KILLS = 5
_PAUSE_S = 16.0
"""Between two kills of a role: a supervisor gives up after five in a minute."""


def restarts(_name: str, options: Options) -> list[Measurement]:
    """A row for each role, with the seconds of each kill."""
    with tempfile.TemporaryDirectory(prefix="headrace-restarts-") as folder:
        settings: dict[str, object] = {
            "run.steps": 100_000,
            "roles.relay": 2,
            "checkpoint.every": 20,
            "queue.max_staleness": 4,
        }
        settings["model.path"] = options.policy or tiny_policy(folder)
        run = Job(Path(folder), **settings).start()
        try:
            run.wait_for_step(1)
            units = _Units(run.dir)
            probes: dict[str, Callable[[], int]] = {
                "hub-0": lambda: _journal(run).count(b'{"event":"HubRestarted"'),
                "relay-0": lambda: units.incarnations.get("relay-0", 0),
                "rollout-0": lambda: _incarnation_of_leases(_journal(run)),
                "actor-0": lambda: _restarts_with_a_step(_journal(run)),
            }
            seconds: dict[str, list[float]] = {name: [] for name in probes}
            for _ in range(_KILLS):
                for name, probe in probes.items():
                    seconds[name].append(_away_s(run, name, probe))
                    time.sleep(_PAUSE_S / len(probes))
            units.close()
        finally:
            run.signal(signal.SIGINT)
            code, output = run.end()
    if code not in (0, 130):
        sys.stderr.write(output)
    return [_row(f"restart-{name.partition('-')[0]}", values, code in (0, 130)) for name, values in seconds.items()]


def _row(name: str, seconds: list[float], holds: bool) -> Measurement:
    least = min(seconds)
    pairs = tuple((value, value / least) for value in seconds)
    return Measurement(name, "its shortest", statistics.median(seconds), "s", 0.0, pairs, holds)


def _away_s(run: Job, name: str, probe: Callable[[], int]) -> float:
    """Kill the process of a role; returns the seconds until its probe shows more than before."""
    before = probe()
    began = time.monotonic()
    os.kill(child_of(run, name), signal.SIGKILL)
    run.until(lambda: probe() > before, interval_s=0.01)
    return time.monotonic() - began


def _journal(run: Job) -> bytes:
    return (run.dir / "journal.jsonl").read_bytes()


def _incarnation_of_leases(journal: bytes) -> int:
    """The latest incarnation of rollout-0 to which rows were leased."""
    ids = re.findall(rb'"holder":"rollout-0","request_id":(\d+)', journal)
    return max((int(number) >> 32 for number in ids), default=0)


def _restarts_with_a_step(journal: bytes) -> int:
    """The number of the trainer's restarts after which it has trained a step."""
    events = re.findall(rb'\{"event":"(TrainerRestarted|Trained)"', journal)
    return sum(pair == (b"TrainerRestarted", b"Trained") for pair in itertools.pairwise(events))


class _Units:
    """The latest incarnation of each relay that has announced its storage unit."""

    def __init__(self, folder: Path) -> None:
        self.incarnations: dict[str, int] = {}
        address = (folder / ADDRESS_FILE).read_text().splitlines()[0]
        self._store = StoreClient.connect(address, read_secret(folder), 30.0)
        self._store.on_changed = self._on_changed
        self._store.ask(lambda number: Watch(number, "relay"))

    def close(self) -> None:
        """End the connection to the store."""
        self._store.close()

    def _on_changed(self, changed: Changed) -> None:
        self.incarnations |= {member.name: member.incarnation for member in changed.members if "unit" in member.info}
