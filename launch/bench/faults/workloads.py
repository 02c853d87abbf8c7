"""The workloads: every target at every moment, every target frozen, and faults at random for minutes."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

from ...processes.child import print_message
from ..harness import Measurement, Options, medians
from .striker import MOMENTS, Fault, Strike, Striker, open_striker

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
"""Seconds that a recovery may take, those of a role with spares when a spare was ready."""
_PAUSES_S = (5.0, 20.0)
_FREEZE_SHARE, _ENDING_SHARE = 0.15, 0.1


def chaos(name: str, options: Options) -> list[Measurement]:
    """Kills and freezes of random targets every 5 to 20 s for `--minutes`, of each target that the run survives and, less
    often, of one that ends it."""
    random = Random(options.seed)
    until = time.monotonic() + 60 * options.minutes
    goes_on = [targets for targets in TARGETS if Fault(targets).ends_the_run is False]
    ends = [targets for targets in (*TARGETS, *LAUNCHING) if Fault(targets).ends_the_run]
    with open_striker(options.seed, num_relays=1) as striker:
        while time.monotonic() < until:
            striker.rest(random.uniform(*_PAUSES_S))
            if random.random() < _FREEZE_SHARE:
                fault = Fault(random.choice(TARGETS), frozen_s=random.choice(FREEZES_S[:2]))
            else:
                is_end = bool(ends) and random.random() < _ENDING_SHARE
                fault = Fault(random.choice(ends if is_end else goes_on))
            striker.strike(fault)
        return summarize(name, striker)


def kill_matrix(name: str, options: Options) -> list[Measurement]:
    """SIGKILL of each target, once it has its spare, at each moment, and of each of `LAUNCHING` at any."""
    moments = [moment for moment in MOMENTS if moment != "forwarding"]
    cells = [*product(moments, TARGETS), *product(["any"], LAUNCHING)]
    rows: list[Measurement] = []
    for num_relays, faults in ((1, cells), (2, product(MOMENTS, TARGETS_OF_TWO_RELAYS))):
        with open_striker(options.seed, num_relays) as striker:
            for moment, targets in faults:
                striker.strike(Fault(targets, moment), with_spares=True)
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
    rows = [*_recoveries(striker.strikes), *striker.flatness.rows()]
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
