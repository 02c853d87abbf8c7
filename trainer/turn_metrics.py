"""Turns, environments and tools of a step's trajectories, in runs with an environment."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from .actor_group import ActorGroup

MOST_NAMES = 32
"""Tools of a step with metrics of their own, the most called ones; the others together are `OTHERS`."""
OTHERS = "others"


class _Figures(msgspec.Struct):
    """What the metrics are computed from; that of two ranks is the sum, entry by entry."""

    turns: list[int] = []
    inserted: int = 0
    """Tokens of observations."""
    environment_s: list[float] = []
    tool_s: list[float] = []
    calls_of: list[int] = []
    """Calls of each trajectory that has tools."""
    calls: dict[str, int] = {}
    failed: dict[str, int] = {}


class TurnMetrics:
    """Collects what `Episode.figures` in rollout/environments/base.py notes on each trajectory."""

    def __init__(self) -> None:
        self._found = _Figures()

    def add(self, noted: Mapping[str, Any], num_inserted: int) -> None:
        """Add a trajectory. num_inserted: the tokens of its response that its environment inserted."""
        found = self._found
        found.turns.append(int(noted["turns"]))
        found.inserted += num_inserted
        found.environment_s += noted["seconds"]
        if (calls := noted["calls"]) is None:
            return
        found.calls_of.append(len(calls))
        for name, has_failed, seconds in calls:
            found.calls[name] = found.calls.get(name, 0) + 1
            found.failed[name] = found.failed.get(name, 0) + bool(has_failed)
            found.tool_s.append(seconds)

    def reduce(self, group: "ActorGroup") -> None:
        """Collect the trajectories of all ranks on rank 0, which records them; a collective."""
        if group.size == 1:
            return
        parts = group.gather(msgspec.msgpack.encode(self._found) if self._found.turns else b"")
        total = _Figures()
        for part in (msgspec.msgpack.decode(part, type=_Figures) for part in parts if part):
            total.turns += part.turns
            total.inserted += part.inserted
            total.environment_s += part.environment_s
            total.tool_s += part.tool_s
            total.calls_of += part.calls_of
            total.calls = dict(Counter(total.calls) + Counter(part.calls))
            total.failed = dict(Counter(total.failed) + Counter(part.failed))
        self._found = total

    def metrics(self) -> dict[str, float]:
        """`turns/*`, `environment/*` and `tools/*`; none without trajectories of turns, and no `tools/*` without tools."""
        found = self._found
        if not found.turns:
            return {}
        num = len(found.turns)
        out = {
            "turns/mean": sum(found.turns) / num,
            "turns/max": float(max(found.turns)),
            "turns/observation_tokens": found.inserted / num,
            **_seconds("environment", found.environment_s),
        }
        if not found.calls_of:
            return out
        num_calls = sum(found.calls_of)
        out["tools/calls_mean"] = num_calls / len(found.calls_of)
        out["tools/called_frac"] = sum(map(bool, found.calls_of)) / len(found.calls_of)
        if num_calls:
            out["tools/failed_frac"] = sum(found.failed.values()) / num_calls
        ranked = sorted(found.calls, key=lambda name: (-found.calls[name], name))
        shown = [*ranked[:MOST_NAMES]]
        for name in shown:
            out |= {
                f"tools/{name}/calls": float(found.calls[name]),
                f"tools/{name}/failed": float(found.failed.get(name, 0)),
            }
        if rest := ranked[MOST_NAMES:]:
            out[f"tools/{OTHERS}/calls"] = float(sum(found.calls[name] for name in rest))
            out[f"tools/{OTHERS}/failed"] = float(sum(found.failed.get(name, 0) for name in rest))
        return out | _seconds("tools", found.tool_s)


def _seconds(what: str, seconds: list[float]) -> dict[str, float]:
    """Mean and 95th percentile, none of no seconds."""
    if not seconds:
        return {}
    return {
        f"{what}/seconds_mean": sum(seconds) / len(seconds),
        f"{what}/seconds_p95": float(np.percentile(seconds, 95)),
    }
