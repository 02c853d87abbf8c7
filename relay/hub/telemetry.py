"""What the hub knows of the fleet's work: the last report of each process, and the difference to the one before."""

from collections import defaultdict
from dataclasses import dataclass

from ...comm.messages import BusyReport, LoadReport
from ..journal.state import HubState


@dataclass(slots=True)
class _Meter:
    before: LoadReport | BusyReport
    now: LoadReport | BusyReport
    reported: LoadReport | BusyReport
    """What the last call of `metrics` went by."""


class FleetStats:
    """Folds reports into the `idle/*`, `rollout/*`, `queue/*`, `weights/*` and `repack/*` metrics of a step.

    A step may ask several times, and the last answer counts; `finish_step` goes on where that one ended, so nothing is lost.
    """

    def __init__(self) -> None:
        self._meters: dict[str, _Meter] = {}
        self._sums: dict[str, float] = defaultdict(float)
        self._reported: dict[str, float] = {}

    def add(self, sender: str, load: LoadReport | BusyReport) -> None:
        meter = self._meters.get(sender)
        if meter is None or _seconds(load) < _seconds(meter.now):  # a process that was started again counts from 0
            meter = self._meters[sender] = _Meter(load, load, load)
        meter.now = load

    def count(self, metric: str, amount: float = 1) -> None:
        """Add to a metric that sums up what happened in a step's interval."""
        self._sums[metric] += amount

    def forget(self, sender: str) -> None:
        self._meters.pop(sender, None)

    def finish_step(self) -> None:
        """Whatever has not been told yet belongs to the next step."""
        for metric, amount in self._reported.items():
            self._sums[metric] -= amount
        self._reported = {}
        for meter in self._meters.values():
            meter.before = meter.reported

    def snapshot(self, state: HubState) -> dict[str, float]:
        """Figures since the step began; roles that did not report are left out."""
        queued = state.queued()
        ready = sum(group.is_complete for group in queued)
        out = {"queue/ready_groups": float(ready), "queue/leased_groups": float(len(queued) - ready)}
        self._reported = {metric: amount for metric, amount in self._sums.items() if amount}
        out |= self._reported
        for role in ("relay", "rollout"):
            meters = [meter for name, meter in self._meters.items() if name.startswith(role)]
            busy = sum(meter.now.busy_s - meter.before.busy_s for meter in meters)
            idle = sum(meter.now.idle_s - meter.before.idle_s for meter in meters)
            if busy + idle <= 0:
                continue
            out[f"idle/{role}"] = idle / (busy + idle)
            if loads := [meter.now for meter in meters if isinstance(meter.now, LoadReport)]:
                before = [meter.before.tokens for meter in meters if isinstance(meter.before, LoadReport)]
                tokens = sum(load.tokens for load in loads) - sum(before)
                out["rollout/tok_per_s"] = tokens * len(loads) / (busy + idle)
                out["rollout/kv_util"] = sum(load.kv_util for load in loads) / len(loads)
                out["weights/pull_s"] = max(load.pull_s for load in loads)
            for meter in meters:
                meter.reported = meter.now
        return out


def _seconds(load: LoadReport | BusyReport) -> float:
    """Seconds since the process started."""
    return load.busy_s + load.idle_s
