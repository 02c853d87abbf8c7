"""What the hub knows of the fleet's work: the last report of each process, and the difference to the one before."""

from collections import defaultdict
from dataclasses import dataclass

from ..comm.messages import Load
from .state import HubState


@dataclass(slots=True)
class _Meter:
    before: Load
    now: Load


class Telemetry:
    """Folds `Load` reports into the `idle/*`, `rollout/*`, `queue/*` and `weights/*` metrics of a step."""

    def __init__(self) -> None:
        self._meters: dict[str, _Meter] = {}
        self._sums: dict[str, float] = defaultdict(float)

    def add(self, sender: str, load: Load) -> None:
        meter = self._meters.setdefault(sender, _Meter(load, load))
        meter.now = load

    def count(self, metric: str, amount: float = 1) -> None:
        """Add to a metric that sums up what happened in a step's interval."""
        self._sums[metric] += amount

    def forget(self, sender: str) -> None:
        self._meters.pop(sender, None)

    def metrics(self, state: HubState) -> dict[str, float]:
        """Figures since the last call, which starts a new interval; roles that did not report are left out."""
        queued = state.queued()
        ready = sum(group.is_complete for group in queued)
        out = {"queue/ready_groups": float(ready), "queue/leased_groups": float(len(queued) - ready)}
        out |= self._sums
        self._sums.clear()
        for role in ("relay", "rollout"):
            meters = [meter for name, meter in self._meters.items() if name.startswith(role)]
            busy = sum(meter.now.busy_s - meter.before.busy_s for meter in meters)
            idle = sum(meter.now.idle_s - meter.before.idle_s for meter in meters)
            if busy + idle <= 0:
                continue
            out[f"idle/{role}"] = idle / (busy + idle)
            if role == "rollout":
                tokens = sum(meter.now.tokens - meter.before.tokens for meter in meters)
                out["rollout/tok_per_s"] = tokens * len(meters) / (busy + idle)
                out["rollout/kv_util"] = sum(meter.now.kv_util for meter in meters) / len(meters)
                out["weights/pull_s"] = max(meter.now.pull_s for meter in meters)
            for meter in meters:
                meter.before = meter.now
        return out
