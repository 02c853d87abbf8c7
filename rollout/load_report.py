"""The work of a rollout since it started, the load of its cache and what became of the tokens that it drew: its report to the hub."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..comm.clock import Clock
from ..comm.messages import DrawnTokens, LoadReport
from .decode_curve import DecodeCurve
from .leased_row import LeasedRow
from .serving.served_side import is_served

if TYPE_CHECKING:
    from .engine.sequence import Completion
    from .generators.base import Generator
    from .leases import HeldLeases
    from .migration.codec import MovedRow
    from .migration.migration import Migration
    from .serving.served_side import ServedSide


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

    def step(self, generator: "Generator", clock: Clock, batch_bound: int, num_served: int = 0) -> "list[Completion]":
        """Record a step of the generator; the curves use it if it only decodes. num_served: sequences that are no leases."""
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
        self.peak_running = max(self.peak_running, num_running - num_served)
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
        self,
        generator: "Generator",
        migration: "Migration",
        tokens: int,
        num_starting: int,
        num_scoring: int = 0,
        served: "ServedSide | None" = None,
    ) -> LoadReport:
        """tokens: those that the policy has drawn. num_starting: trajectories whose environments are reset. num_scoring: those without a reward.

        Those that it serves are left out: they do not move, and no weights wait for them. The room that they take bounds the rest.
        """
        leased = [part for part in generator.unfinished() if not is_served(part.trajectory_id)]
        num_served, num_decoding = (served.num_served, served.num_running) if served is not None else (0, 0)
        num_running = max(0, generator.num_running - num_decoding)
        num_waiting = max(0, generator.num_waiting - (num_served - num_decoding))
        num_paused = len(leased) - num_running - num_waiting
        return LoadReport(
            version=generator.weights.version,
            num_running=num_running,
            num_waiting=num_waiting,
            kv_util=generator.kv_load / generator.kv_capacity,
            tokens=tokens,
            busy_s=self.busy_s,
            idle_s=self.idle_s,
            pull_s=self.pull_s,
            kv_used=sum(part.num_tokens for part in leased),
            kv_max=generator.kv_capacity,
            kv_fixed=self.small_curve.fixed_tokens,
            batch_bound=max(1, migration.batch_bound - num_served) if migration.batch_bound else 0,
            prefilled=generator.num_prefilled,
            found=generator.num_found,
            num_at_tools=max(0, num_paused) + num_starting,
            peak_running=self.peak_running,
            num_scoring=num_scoring,
        )


class TokenAccount:
    """Counts the tokens of one incarnation of a rollout, from `begin` on, evaluations included.

    The generator counts what it draws (`num_sampled`). That number is compared with those of the trajectories, so that none is lost
    without notice. A generator may not know it: then what is known of the trajectories stands for it.
    """

    def __init__(
        self, generator: "Generator", leases: "HeldLeases", incarnation: int, served: "ServedSide | None" = None
    ) -> None:
        """served: sequences that are no leases; their tokens are counted apart."""
        self._generator = generator
        self._served = served
        self._leases = leases
        self._incarnation = incarnation
        self._before = 0
        """Tokens drawn to measure the generator."""
        self._ended = 0
        """Tokens of the trajectories whose end was reported."""
        self._known = 0

    def begin(self) -> None:
        """Leave out what was drawn so far."""
        self._before = self._generator.num_sampled or 0

    def end(self, held: LeasedRow) -> None:
        """Count a trajectory whose end is reported next."""
        held.tokens_then = self.report(())
        self._ended += held.num_from_policy

    def report(self, moving: "Iterable[MovedRow]", *, is_whole: bool = False) -> DrawnTokens:
        """The tokens so far. moving: trajectories offered to other rollouts. is_whole: with those of unfinished trajectories."""
        unfinished = self._unfinished(moving) if is_whole else 0
        drawn = self._generator.num_sampled
        served = self._served.num_drawn() if self._served is not None else 0
        if drawn is None:
            drawn = self._known = max(self._known, self._ended + unfinished)
        else:
            drawn -= served
        return DrawnTokens(self._incarnation, drawn - self._before, self._ended, unfinished, served)

    def _unfinished(self, moving: "Iterable[MovedRow]") -> int:
        held = self._leases.held
        ended = sum(row.num_from_policy for row in held.values() if row.completion is not None)
        sent = sum(len(row.state.token_ids) - _inserted(row.held) for row in moving)
        parts = ((held.get(part.trajectory_id), part.num_response) for part in self._generator.unfinished())
        begun = sum(num - _inserted(row) for row, num in parts if row is not None and row.completion is None)
        return ended + sent + begun


def _inserted(row: LeasedRow) -> int:
    return 0 if row.episode is None else row.episode.num_inserted()
