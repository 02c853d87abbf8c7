"""Figures of the fleet's work: the last report of each process, less the report at the end of the step before."""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from ...comm.messages import BusyReport, LoadReport
from ...comm.messages.base import role_of
from ..journal.hub_state import HubState
from .token_ledger import TokenLedger, step_metrics


@dataclass(slots=True)
class _Meter:
    before: LoadReport | BusyReport
    now: LoadReport | BusyReport


class Snapshot(NamedTuple):
    """The metrics of a step so far, with the sums and reports that they were computed from."""

    metrics: dict[str, float]
    sums: dict[str, float]
    reports: list[tuple[_Meter, LoadReport | BusyReport]]
    tokens: dict[str, int]
    """The terms of the account of tokens since the run was last started."""


class FleetStats:
    """Folds reports into the `idle/*`, `rollout/*`, `queue/*`, `weights/*` and `repack/*` metrics of a step.

    A step may take several snapshots, and its metrics are those of the last one. `finish_step` begins the next step at that
    snapshot, so work that came later counts in the next step.
    """

    def __init__(self, ledger: TokenLedger | None = None) -> None:
        """ledger: the account of tokens, which is in the metrics of a step too."""
        self._ledger = ledger
        self._tokens_before: dict[str, int] | None = {} if ledger is not None and ledger.is_new else None
        """The account at the end of the step before; None where that is not known."""
        self._meters: dict[str, _Meter] = {}
        self._sums: dict[str, float] = defaultdict(float)

    def add(self, sender: str, load: LoadReport | BusyReport) -> None:
        """Record a report. The counters of a restarted process begin at 0."""
        meter = self._meters.get(sender)
        if meter is None or _seconds(load) < _seconds(meter.now):
            meter = self._meters[sender] = _Meter(load, load)
        meter.now = load

    def count(self, metric: str, amount: float = 1) -> None:
        """Add to a metric that is a sum over the step."""
        self._sums[metric] += amount

    @property
    def tokens(self) -> int:
        """Tokens that the rollouts have drawn and prefilled since they started, by their last reports."""
        loads = [meter.now for meter in self._meters.values() if isinstance(meter.now, LoadReport)]
        return sum(load.tokens + load.prefilled for load in loads)

    def forget(self, sender: str) -> None:
        self._meters.pop(sender, None)

    def finish_step(self, reported: Snapshot) -> None:
        """Begin the next step where a snapshot ended."""
        self._tokens_before = reported.tokens
        for metric, amount in reported.sums.items():
            self._sums[metric] -= amount
        for meter, load in reported.reports:
            meter.before = load

    def snapshot(self, state: HubState) -> Snapshot:
        """Figures since the step began; roles without reports are left out."""
        ready = len(state.queue.ready)
        sums = {metric: amount for metric, amount in self._sums.items() if amount}
        out = {"queue/ready": float(ready), "queue/leased": float(state.num_queued - ready), **sums}
        out["queue/starved_s"] = state.window.starved_s
        for role in ("relay", "rollout"):
            meters = [meter for name, meter in self._meters.items() if role_of(name) == role]
            busy = sum(meter.now.busy_s - meter.before.busy_s for meter in meters)
            idle = sum(meter.now.idle_s - meter.before.idle_s for meter in meters)
            if busy + idle <= 0:
                continue
            out[f"idle/{role}"] = idle / (busy + idle)
            if loads := [meter.now for meter in meters if isinstance(meter.now, LoadReport)]:
                before = [meter.before for meter in meters if isinstance(meter.before, LoadReport)]
                tokens, prefilled, found = (
                    sum(getattr(load, name) for load in loads) - sum(getattr(load, name) for load in before)
                    for name in ("tokens", "prefilled", "found")
                )
                out["rollout/tok_per_s"] = tokens * len(loads) / (busy + idle)
                if found + prefilled:
                    out["rollout/prefix_cache_hit_rate"] = found / (found + prefilled)
                out["rollout/kv_util"] = sum(load.kv_util for load in loads) / len(loads)
                out["weights/pull_s"] = max(load.pull_s for load in loads)
        tokens = {} if self._ledger is None else self._ledger.at_step_end()
        if self._ledger is not None and self._tokens_before is not None:
            out |= step_metrics(tokens, self._tokens_before)
        return Snapshot(out, sums, [(meter, meter.now) for meter in self._meters.values()], tokens)


def _seconds(load: LoadReport | BusyReport) -> float:
    """Seconds since the process started."""
    return load.busy_s + load.idle_s
