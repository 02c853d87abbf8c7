"""Measures a generator at the start: its prefill, and the batch up to which decoding costs nearly as little as a small one."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...comm.clock import REAL_TIME, Clock
from ..engine.sampling import SamplingParams
from ..generators.base import GeneratorProfile

if TYPE_CHECKING:
    from ..generators.base import Generator

SLOWDOWN_LIMIT = 1.25
"""A decode step at the batch bound takes this many times as long as a small one (Laminar's bound B)."""
PATIENCE_S = 1.0
"""Seconds after which the measurement tries no larger batch."""
STEPS = 3
PROMPT_TOKENS = 16


class TransferCostModel:
    """Decides whether keys and values move with a trajectory or are computed again, by the measured costs."""

    def __init__(self) -> None:
        self._byte_s: dict[bool, float] = {}
        """Seconds per byte, by whether the transfer went through shared memory."""

    def should_send_cache(self, is_here: bool, token_bytes: int, prefill_s: float) -> bool:
        """Whether moving a token's keys and values takes less time than computing them. A way not yet measured is tried."""
        return self._byte_s.get(is_here, 0.0) * token_bytes < prefill_s

    def record(self, is_here: bool, num_bytes: int, seconds: float) -> None:
        """Record the source's time for a transfer; the destination is assumed to need as much again."""
        self._byte_s[is_here] = 2 * seconds / num_bytes


def calibrate(generator: "Generator", max_batch: int, clock: Clock = REAL_TIME) -> GeneratorProfile:
    """Measure an idle generator with trajectories that are then dropped; takes about a second at most.

    The batch is doubled until a step takes `SLOWDOWN_LIMIT` times as long as the fastest.
    """
    started = clock.now()
    params = SamplingParams(max_new_tokens=generator.context, ignore_eos=True)
    prefill_s = _prefill_s(generator, params, clock)
    curve: list[tuple[int, float]] = []
    batch = 0
    while batch < max_batch:
        before = batch
        batch = min(max(1, 2 * batch), max_batch)
        generator.add_group(_prompt(generator, PROMPT_TOKENS), params, range(-before - 1, -batch - 1, -1))
        if (seconds := _step_s(generator, batch, clock)) is None:
            break
        curve.append((batch, seconds))
        if seconds > SLOWDOWN_LIMIT * min(s for _, s in curve) or clock.now() - started > PATIENCE_S:
            break
    _drop_all(generator)
    return GeneratorProfile(batch_bound(curve), prefill_s)


def batch_bound(curve: Iterable[tuple[int, float]]) -> int:
    """The batch at which a curve of (batch, seconds per step) reaches `SLOWDOWN_LIMIT` times its least; else its last batch.

    Batches ascend; the curve is interpolated linearly between two points.
    """
    points = list(curve)
    limit = SLOWDOWN_LIMIT * min(seconds for _, seconds in points)
    before = points[0]
    for point in points:
        if point[1] > limit and point[0] > before[0]:
            share = max(0.0, limit - before[1]) / (point[1] - before[1])
            return int(before[0] + share * (point[0] - before[0]))
        before = point
    return before[0]


def _step_s(generator: "Generator", batch: int, clock: Clock) -> float | None:
    """The fastest of a few steps at this batch, after one warm-up step. None if the cache does not hold the batch."""
    for _ in range(batch):
        if not generator.num_waiting:
            break
        generator.step()
    generator.step()
    if generator.num_waiting:
        return None
    seconds: list[float] = []
    for _ in range(STEPS):
        started = clock.now()
        generator.step()
        seconds.append(clock.now() - started)
    return min(seconds)


def _prefill_s(generator: "Generator", params: SamplingParams, clock: Clock) -> float:
    """Seconds per token of a long prompt."""
    prompt = _prompt(generator, 512)
    generator.add_group(prompt, params, [-1])
    started = clock.now()
    while generator.num_waiting:
        generator.step()
    seconds = clock.now() - started
    _drop_all(generator)
    return seconds / len(prompt)


def _drop_all(generator: "Generator") -> None:
    generator.export_sequences([live.trajectory_id for live in generator.unfinished()])
    while not generator.idle:
        generator.step()


def _prompt(generator: "Generator", num_tokens: int) -> list[int]:
    return [0] * max(1, min(num_tokens, generator.context // 2))
