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
    """Totals of a rollout since it started, in seconds."""

    busy_s: float = 0.0
    idle_s: float = 0.0
    pull_s: float = 0.0
    reported_at: float = 0.0
    idle_since: float = math.inf
    """When the idle turn before this one began; infinite after another one."""

    curve: DecodeCurve = field(default_factory=DecodeCurve)
    """Curve of all steps that only decode."""
    small_curve: DecodeCurve = field(default_factory=DecodeCurve)
    """Curve of the steps within the batch bound, where a trajectory hardly makes a step longer; beyond the bound the curve has another slope."""
    num_steps: int = 0
    """Steps of the generator, as are the next three: those that prefill are among them."""
    step_s: float = 0.0
    step_tokens: int = 0
    """Trajectories of each step, summed."""
    step_kv: int = 0
    """Cached tokens of each step, summed."""
    peak_running: int = 0
    """Most trajectories of a step since the last change of weights."""

    def step(self, generator: "Generator", clock: Clock, batch_bound: int) -> "list[Completion]":
        """Record a step of the generator; the curves use it if it only decodes."""
        only_decodes = not generator.num_waiting
        started = clock.now()
        num_running = generator.num_running
        kv_load = generator.kv_load
        completions = generator.step()
        seconds = clock.now() - started
        if not only_decodes:  # those that were prefilled have decoded too
            num_running = generator.num_running + len(completions)
            kv_load = max(kv_load, generator.kv_load)
        elif generator.num_running:
            self.decoded(num_running, kv_load, seconds, batch_bound)
        self.peak_running = max(self.peak_running, num_running)
        self.num_steps = self.num_steps + 1
        self.step_s = self.step_s + seconds
        self.step_tokens = self.step_tokens + num_running
        self.step_kv = self.step_kv + kv_load
        return completions

    def decoded(self, num_running: int, kv_load: int, seconds: float, batch_bound: int) -> None:
        """Record a step that only decoded."""
        self.curve.add(num_running, kv_load, seconds)
        if num_running <= batch_bound:
            self.small_curve.add(num_running, kv_load, seconds)

    def end_idle(self, now: float) -> None:
        """Count the previous idle turn, which ends now."""
        self.idle_s += max(0.0, now - self.idle_since)
        self.idle_since = math.inf

    def counters(self, generator: "Generator") -> dict[str, float]:
        """The measured terms of a step, and what they are to explain: for the trace, from which `launch/lab/plan.py` reads them."""
        fixed_s, trajectory_s, token_s = self.curve.terms()
        return {
            "kv_tokens": generator.kv_capacity, "kv_token_bytes": generator.kv_token_bytes, "steps": self.num_steps,
            "step_s": self.step_s, "step_tokens": self.step_tokens, "step_kv": self.step_kv, "fixed_s": fixed_s,
            "trajectory_s": trajectory_s, "token_s": token_s,
        }  # fmt: skip

    def report(
        self, generator: "Generator", migration: "Migration", tokens: int, num_starting: int, num_scoring: int = 0
    ) -> LoadReport:
        """tokens: those that the policy has drawn. num_starting: trajectories whose environments are reset. num_scoring: those without a reward."""
        num_paused = len(generator.unfinished()) - generator.num_running - generator.num_waiting
        return LoadReport(
            version=generator.weights.version,
            num_running=generator.num_running,
            num_waiting=generator.num_waiting,
            kv_util=generator.kv_load / generator.kv_capacity,
            tokens=tokens,
            busy_s=self.busy_s,
            idle_s=self.idle_s,
            pull_s=self.pull_s,
            kv_used=migration.kv_used,
            kv_max=generator.kv_capacity,
            kv_fixed=self.small_curve.fixed_tokens,
            batch_bound=migration.batch_bound,
            prefilled=generator.num_prefilled,
            found=generator.num_found,
            num_at_tools=max(0, num_paused) + num_starting,
            peak_running=self.peak_running,
            num_scoring=num_scoring,
        )
