"""The workloads: every target at every moment, every target frozen, and faults at random for minutes."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

from headrace.launch.processes.child import print_message

from ..harness import Measurement, Options, medians
from .memory_cgroup import own_cgroup
from .read_only import may_mount
from .striker import FOLDERS, MOMENTS, Fault, Strike, Striker, open_striker

TARGETS = (
    ("rollout-0",),
    ("rollout-0", "rollout-1"),
    ("relay-0",),
    ("hub",),
    ("actor-0",),
    ("supervisor of rollout-0",),
    ("host of rollout-0",),
)
LAUNCHING = (
    ("supervisor of actor-0",),
    ("host of actor-0",),
    ("supervisor of relay-0",),
    ("host of relay-0",),
    ("store",),
    ("torchrun",),
    ("launcher",),
)
"""Targets whose death ends the run at whatever moment."""
TARGETS_OF_TWO_RELAYS = (("relay-0",), ("relay-0", "relay-1"))
FREEZES_S = (5.0, 14.0, 30.0, 60.0)
AIMS_S = {"rollout-failover": 0.5, "relay-restart": 1.0, "hub-restart": 3.0, "actor-next-step": 3.0}
"""Seconds that a recovery may take."""
_PAUSES_S = (5.0, 20.0)
_FREEZE_SHARE, _STARVE_SHARE, _READ_ONLY_SHARE, _ENDING_SHARE = 0.15, 0.1, 0.05, 0.1
STARVED = (("rollout-0",), ("relay-0",), ("hub",), ("actor-0",))
_READ_ONLY_S = 2.0


def chaos(name: str, options: Options) -> list[Measurement]:
    """Faults of random targets every 5 to 20 s for `--minutes`: mostly kills, some freezes, kills for memory and folders that are
    read-only for a while where this machine lets us make them, and kills that end the run."""
    random = Random(options.seed)
    until = time.monotonic() + 60 * options.minutes
    with open_striker(options.seed, num_relays=1) as striker:
        while time.monotonic() < until:
            striker.rest(random.uniform(*_PAUSES_S))
            striker.strike(
                _any_fault(random, can_starve=own_cgroup() is not None, can_mount=may_mount(striker.job.home))
            )
        return summarize(name, striker)


def _any_fault(random: Random, *, can_starve: bool, can_mount: bool) -> Fault:
    kills = [Fault(targets) for targets in (*TARGETS, *LAUNCHING)]
    shares: list[tuple[float, list[Fault]]] = [
        (_FREEZE_SHARE, [Fault(targets, frozen_s=seconds) for targets in TARGETS for seconds in FREEZES_S[:2]]),
        (_STARVE_SHARE * can_starve, [Fault(targets, starves=True) for targets in STARVED]),
        (_READ_ONLY_SHARE * can_mount, [Fault((FOLDERS,), frozen_s=_READ_ONLY_S)]),
        (_ENDING_SHARE, [fault for fault in kills if fault.ends_the_run]),
    ]
    left = 1 - sum(share for share, _ in shares)
    shares.append((left, [fault for fault in kills if not fault.ends_the_run]))
    return random.choice(random.choices([faults for _, faults in shares], [share for share, _ in shares])[0])


def kill_matrix(name: str, options: Options) -> list[Measurement]:
    """SIGKILL of each target at each moment, and of each of `LAUNCHING` at any."""
    moments = [moment for moment in MOMENTS if moment != "forwarding"]
    cells = [*product(moments, TARGETS), *product(["any"], LAUNCHING)]
    rows: list[Measurement] = []
    for num_relays, faults in ((1, cells), (2, product(MOMENTS, TARGETS_OF_TWO_RELAYS))):
        with open_striker(options.seed, num_relays) as striker:
            for moment, targets in faults:
                striker.strike(Fault(targets, moment))
            rows += summarize(f"{name}-{num_relays}-relays", striker)
    return rows


def freeze_matrix(name: str, options: Options) -> list[Measurement]:
    """SIGSTOP of each target for 5, 14, 30 and 60 s."""
    with open_striker(options.seed, num_relays=1) as striker:
        for seconds in FREEZES_S:
            for names in TARGETS:
                striker.strike(Fault(names, frozen_s=seconds))
        return summarize(name, striker)


def summarize(name: str, striker: Striker) -> list[Measurement]:
    """End the run; rows with the medians of recovery times, growth, and how many faults struck and did not hold."""
    at_end = striker.finish()
    rows = [*_recoveries(striker.strikes), *striker.growth.rows()]
    struck = [strike for strike in striker.strikes if strike.has_struck]
    broken = [strike for strike in struck if strike.problems]
    for strike in broken:
        print_message(f"did not hold: {strike.fault}: {'; '.join(strike.problems)}")
    rows.append(Measurement(f"{name}-steps", "", striker.job.tail.steps, "steps", float("nan")))
    rows.append(Measurement(f"{name}-struck", "planned", len(struck), "faults", len(struck) / len(striker.strikes)))
    failures = len(broken) + bool(at_end)
    rows.append(Measurement(f"{name}-broken", "struck", failures, "faults", failures / len(struck), holds=not failures))
    return rows


def _recoveries(strikes: Sequence[Strike]) -> Iterator[Measurement]:
    """Medians of the recovery times after kills, over their aims."""
    times: dict[str, list[float]] = defaultdict(list)
    for strike in strikes:
        if not strike.fault.frozen_s:
            for what, seconds in strike.recovery.items():
                times[what].append(seconds)
    for what, seconds in sorted(times.items()):
        aim = AIMS_S.get(what, float("nan"))
        peer = f"an aim of {aim:g} s" if what in AIMS_S else ""
        yield from medians([[Measurement(what, peer, value, "s", value / aim)] for value in seconds])
