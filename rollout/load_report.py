"""The work of a rollout since it started and the load of its cache: its report to the hub."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..comm.clock import Clock
from ..comm.messages import LoadReport
from .decode_curve import DecodeCurve

if TYPE_CHECKING:
    from .engine.sequence import Completion
    from .generators.base import Generator
    from .migration.migration import Migration


@dataclass(slots=True)
class LoadTotals:
    """Totals of a rollout since it started; tokens that its policy drew, and seconds."""

    tokens: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    pull_s: float = 0.0
    reported_at: float = 0.0
    idle_since: float = math.inf
    """When the idle turn before this one began; infinite after another one."""

    curve: DecodeCurve = field(default_factory=DecodeCurve)

    def step(self, generator: "Generator", clock: Clock) -> "list[Completion]":
        """A step of the generator; the curve takes it in if it only decodes."""
        only_decodes, started = not generator.num_waiting, clock.now()
        num_running, kv_load = generator.num_running, generator.kv_load
        completions = generator.step()
        if only_decodes and generator.num_running:
            self.curve.add(num_running, kv_load, clock.now() - started)
        return completions

    def end_idle(self, now: float) -> None:
        """Count the idle turn before this one, which ends now."""
        self.idle_s += max(0.0, now - self.idle_since)
        self.idle_since = math.inf

    def report(self, generator: "Generator", migration: "Migration") -> LoadReport:
        return LoadReport(
            version=generator.weights.version,
            num_running=generator.num_running,
            num_waiting=generator.num_waiting,
            kv_util=generator.kv_load / generator.kv_capacity,
            tokens=self.tokens,
            busy_s=self.busy_s,
            idle_s=self.idle_s,
            pull_s=self.pull_s,
            kv_used=migration.kv_used,
            kv_max=generator.kv_capacity,
            kv_fixed=self.curve.fixed_tokens,
            batch_bound=migration.batch_bound,
            prefilled=generator.num_prefilled,
            found=generator.num_found,
        )
