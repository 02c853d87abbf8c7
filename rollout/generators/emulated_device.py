"""An emulated device that decodes: who runs, what the KV cache holds, and when each step is over. No I/O, no sleep.

A decode step of n trajectories over k cached tokens takes

    max(weights_ms, n request_us) + k kv_ns

(the roofline of decoding: the weights are read once for all, keys and values by each), a prefill `prefill_us` per token.
Groups prefill their prompt once. Trajectories enter as long as the cache has room for them and a margin; when it is full, the
newest gives way and is prefilled again later.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...comm.messages.base import trajectory_group
from ...comm.recipe import EmulatedSettings

MARGIN_TOKENS = 16
"""Room per running trajectory that is left when another one enters."""


@dataclass(slots=True, eq=False)
class EmulatedSequence:
    """One trajectory on the device."""

    trajectory_id: int
    num_prompt: int
    limit: int
    """Tokens of the response when it is finished."""
    num_new: int = 0
    num_missing: int = 0
    """Tokens to prefill before it runs."""
    wait_s: float = 0.0
    """Seconds that its keys and values take to arrive instead."""

    @property
    def num_tokens(self) -> int:
        """Prompt and response so far."""
        return self.num_prompt + self.num_new


class EmulatedDevice:
    """`waiting` (oldest first) and `running` trajectories; `load` tokens in the cache; `seconds` of work done so far."""

    def __init__(self, settings: EmulatedSettings, max_running: int) -> None:
        self.settings = settings
        self.max_running = max_running
        self.waiting: deque[EmulatedSequence] = deque()
        self.running: list[EmulatedSequence] = []
        self.load = 0
        self.seconds = 0.0
        self.num_recomputed = 0
        """Tokens that gave up their place in the cache to be prefilled again."""
        self.num_preempted = 0

    def add(self, sequences: Iterable[EmulatedSequence]) -> None:
        """Queue trajectories."""
        self.waiting.extend(sequences)

    def advance(self, num_steps: int) -> list[EmulatedSequence]:
        """Up to `num_steps` decode steps, with whatever enters meanwhile; returns the trajectories that finished."""
        finished: list[EmulatedSequence] = []
        while num_steps > 0:
            self._enter()
            if not self.running:
                break
            room = (self.settings.kv_tokens - self.load) // len(self.running)
            if room == 0 and len(self.running) > 1:
                self._preempt()
                continue
            n = min(num_steps, max(1, room), min(s.limit - s.num_new for s in self.running))
            self.seconds += self.steps_s(len(self.running), self.load, n)
            self.load += n * len(self.running)
            num_steps -= n
            finished += self._decoded(n)
        return finished

    def steps_s(self, num_running: int, load: int, num_steps: int) -> float:
        """Seconds of consecutive decode steps, the cache growing by one token per trajectory and step."""
        e = self.settings
        base = max(e.weights_ms * 1e-3, num_running * e.request_us * 1e-6)
        tokens = load * num_steps + num_running * num_steps * (num_steps - 1) / 2
        return num_steps * base + tokens * e.kv_ns * 1e-9

    def recompute(self) -> None:
        """Forget the cache: everything that ran is prefilled again, in its order."""
        prompts: set[int] = set()
        for strand in self.running:
            # A prompt is prefilled once for the samples of its group.
            group = trajectory_group(strand.trajectory_id)
            is_shared = group in prompts
            strand.num_missing = strand.num_new if is_shared else strand.num_tokens
            prompts.add(group)
            self.num_recomputed += strand.num_missing
        self.waiting.extendleft(reversed(self.running))
        self.running, self.load = [], 0

    def remove(self, trajectory_id: int) -> EmulatedSequence | None:
        """Take a trajectory off the device; None if it is not there."""
        for strand in self.waiting:
            if strand.trajectory_id == trajectory_id:
                self.waiting.remove(strand)
                return strand
        for strand in self.running:
            if strand.trajectory_id == trajectory_id:
                self.running.remove(strand)
                self.load -= strand.num_tokens
                return strand
        return None

    def _enter(self) -> None:
        """Let waiting trajectories run, oldest first, and prefill what they miss."""
        while self.waiting and len(self.running) < self.max_running:
            strand = self.waiting[0]
            margin = MARGIN_TOKENS * (len(self.running) + 1)
            if self.running and self.load + strand.num_tokens + margin > self.settings.kv_tokens:
                break
            self.waiting.popleft()
            self.running.append(strand)
            self.load += strand.num_tokens
            self.seconds += strand.num_missing * self.settings.prefill_us * 1e-6 + strand.wait_s
            strand.num_missing, strand.wait_s = 0, 0.0

    def _preempt(self) -> None:
        strand = self.running.pop()
        self.load -= strand.num_tokens
        strand.num_missing = strand.num_tokens
        self.num_recomputed += strand.num_missing
        self.waiting.appendleft(strand)
        self.num_preempted += 1

    def _decoded(self, num_steps: int) -> list[EmulatedSequence]:
        for strand in self.running:
            strand.num_new += num_steps
        finished = [strand for strand in self.running if strand.num_new >= strand.limit]
        if finished:
            self.running = [strand for strand in self.running if strand.num_new < strand.limit]
            self.load -= sum(strand.num_tokens for strand in finished)
        return finished


def response_length(seed: int, trajectory_id: int, settings: EmulatedSettings, longest: int) -> int:
    """The length of a trajectory's response: log-normal, a function of (seed, trajectory id) alone."""
    sigma = math.log(settings.p99_over_median) / 2.3263  # the normal distribution's 99th percentile
    draw = np.random.default_rng([seed, trajectory_id & (1 << 63) - 1]).standard_normal()
    return max(1, min(longest, round(settings.median_tokens * math.exp(sigma * draw))))
