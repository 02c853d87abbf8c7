"""What a generator can do, measured at the start: how many trajectories decode for nearly the price of few, and its prefill."""

import time
from collections.abc import Iterable
from typing import NamedTuple

from ..engine.sampling import SamplingParams
from ..generators.base import Generator

SLOWDOWN_LIMIT = 1.25
"""A decode step of the batch bound takes so many times as long as a small one (Laminar's bound B)."""
PATIENCE_S = 1.0
"""The measurement begins no larger batch after this."""
STEPS = 3
PROMPT_TOKENS = 16


class GeneratorProfile(NamedTuple):
    """`batch_bound` trajectories; `prefill_s` seconds per token."""

    batch_bound: int
    prefill_s: float


class TransferCostModel:
    """Whether keys and values travel with a trajectory or are computed again: as set, or by what either has cost."""

    def __init__(self, transfer: str) -> None:
        self.transfer = transfer
        self._byte_s: dict[bool, float] = {}
        """Seconds per byte, by whether it went through shared memory."""

    def should_send_cache(self, is_here: bool, token_bytes: int, prefill_s: float) -> bool:
        """Whether a token's keys and values go faster than they are computed. What was never measured is tried."""
        if self.transfer != "auto":
            return self.transfer == "pages"
        return self._byte_s.get(is_here, 0.0) * token_bytes < prefill_s

    def record(self, is_here: bool, num_bytes: int, seconds: float) -> None:
        """Take in what the source spent on a transfer; the destination is taken to spend as much again."""
        self._byte_s[is_here] = 2 * seconds / num_bytes


def calibrate(generator: Generator, max_batch: int) -> GeneratorProfile:
    """Measure an idle generator with trajectories that are thrown away; at most about a second.

    Batches are doubled until a step takes `SLOWDOWN_LIMIT` times as long as the fastest did.
    """
    started = time.monotonic()
    params = SamplingParams(max_new_tokens=generator.context, ignore_eos=True)
    prefill_s = _prefill_s(generator, params)
    curve: list[tuple[int, float]] = []
    ids: list[int] = []
    for batch in _doubling(max_batch):
        new = range(-len(ids) - 1, -batch - 1, -1)
        ids += new
        generator.add_group(_prompt(generator, PROMPT_TOKENS), params, new)
        if (seconds := _step_s(generator, batch)) is None:
            break
        curve.append((batch, seconds))
        if curve[-1][1] > SLOWDOWN_LIMIT * min(s for _, s in curve) or time.monotonic() - started > PATIENCE_S:
            break
    generator.export_sequences([live.trajectory_id for live in generator.unfinished()])
    while not generator.idle:
        generator.step()
    return GeneratorProfile(batch_bound(curve), prefill_s)


def batch_bound(curve: Iterable[tuple[int, float]]) -> int:
    """Where a curve of (batch, seconds per step), batches ascending, reaches `SLOWDOWN_LIMIT` times its least; else its last batch.

    Between two points the curve is taken to be straight.
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


def _doubling(most: int) -> list[int]:
    batches = [1]
    while batches[-1] < most:
        batches.append(min(2 * batches[-1], most))
    return batches


def _step_s(generator: Generator, batch: int) -> float | None:
    """The fastest of a few steps at this batch, after one that the generator may need to get used to it.

    None if its cache does not hold so many.
    """
    for _ in range(batch):
        if not generator.num_waiting:
            break
        generator.step()
    generator.step()
    if generator.num_waiting:
        return None
    seconds: list[float] = []
    for _ in range(STEPS):
        started = time.monotonic()
        generator.step()
        seconds.append(time.monotonic() - started)
    return min(seconds)


def _prefill_s(generator: Generator, params: SamplingParams) -> float:
    """Seconds per token of a prompt as long as is worth measuring."""
    prompt = _prompt(generator, 512)
    generator.add_group(prompt, params, [-1])
    started = time.monotonic()
    while generator.num_waiting:
        generator.step()
    seconds = time.monotonic() - started
    generator.export_sequences([-1])
    while not generator.idle:
        generator.step()
    return seconds / len(prompt)


def _prompt(generator: Generator, num_tokens: int) -> list[int]:
    return [0] * max(1, min(num_tokens, generator.context // 2))
