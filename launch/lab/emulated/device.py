"""An emulated device that decodes: its batch, the load of its KV cache, and the time of each step. No I/O, no sleep.

A decode step of n trajectories over k cached tokens takes

    step_ms + max(host_ms, max(weights_ms, n request_us) + k kv_ns)

(the roofline of decoding: the weights are read once for all trajectories, keys and values by each; a host that launches every
kernel may be slower); a prefill takes `prefill_us` per token. A group prefills its prompt once. Trajectories enter as long as the cache has room for them and a
margin; when it is full, the newest is preempted and prefilled again later.

With `lab.turns` a trajectory waits for a tool after each turn. It keeps its cache until others need it, and no place in the batch, as
in the program's engine; then it queues like a new one.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ....comm.messages.base import trajectory_group
from ..settings import LabSettings

MARGIN_TOKENS = 16
"""Free tokens in the cache per running trajectory, required for another one to enter."""
TOOL_P99 = 10.0
"""The 99th percentile of a tool's seconds over their median (Laminar, figure 2)."""
IDLE_S = 0.5
"""Most seconds for which a device that waits for tools alone hears no messages."""


@dataclass(slots=True, eq=False)
class EmulatedSequence:
    """One trajectory on the device."""

    trajectory_id: int
    num_prompt: int
    limit: int
    """Tokens of the finished response."""
    num_new: int = 0
    """Tokens of the response; while it runs, those that it had when it entered (see `EmulatedDevice.num_tokens`)."""
    num_missing: int = 0
    """Tokens to prefill before it runs."""
    arrives_at: float = 0.0
    """Seconds of the device's work after which its keys and values are there, if they are sent."""
    holds_cache: bool = False
    """Whether it waits for its place with its cache, which counts in `load`: its tool has answered."""
    entered_at: int = 0
    """Decode steps of the device when it entered."""
    stop: int = 0
    """Tokens of the response at which its present turn ends."""

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_new


class EmulatedDevice:
    """`waiting` (oldest first) and `running` trajectories; `load` tokens in the cache; `seconds` of work so far."""

    def __init__(self, settings: LabSettings, max_running: int, seed: int = 0) -> None:
        """seed: of the tools' times."""
        self.settings = settings
        self._seed = seed
        self.max_running = max_running
        self.waiting: deque[EmulatedSequence] = deque()
        self.running: dict[int, EmulatedSequence] = {}
        """The running sequences by trajectory, in order of entry."""
        self.paused: dict[int, EmulatedSequence] = {}
        """The sequences that wait for tools, by trajectory, in the order of their pauses; one without missing tokens has its cache."""
        self._answers: list[tuple[float, int]] = []
        """A heap of (seconds of the device at which a tool answers, trajectory)."""
        self.load = 0
        self._num_steps = 0
        self._ends: list[tuple[int, int]] = []
        """A heap of (decode step at which it is finished, trajectory), with some that have left the batch."""
        self.seconds = 0.0
        self._arrived_at = 0.0
        """When the keys and values of the last sequence that was sent are there; its link carries one at a time."""
        self.num_recomputed = 0
        """Tokens dropped from the cache and prefilled again."""
        self.num_preempted = 0
        self.num_sampled = 0
        """Tokens drawn so far."""

    def add(self, sequences: Iterable[EmulatedSequence]) -> None:
        self.waiting.extend(sequences)

    def receive(self, sequence: EmulatedSequence) -> None:
        """Add a sequence whose keys and values are sent; the running ones are decoded meanwhile."""
        e = self.settings
        assert e.kv_gb_s is not None, "keys and values are not sent on these devices"
        self._arrived_at = (
            max(self._arrived_at, self.seconds) + sequence.num_tokens * e.kv_token_bytes / e.kv_gb_s / 1e9
        )
        sequence.arrives_at = self._arrived_at
        self.add([sequence])

    def advance(self, num_steps: int) -> list[EmulatedSequence]:
        """Up to `num_steps` decode steps, with the trajectories that enter meanwhile; returns those that finished."""
        finished: list[EmulatedSequence] = []
        while num_steps > 0:
            self._take_answers()
            self._enter()
            if not self.running:
                if self.paused:
                    self.seconds = min(self._answers[0][0], self.seconds + IDLE_S)
                break
            room = (self.settings.kv_tokens - self.load) // len(self.running)
            if room <= 0 and self._drop_cache():
                continue
            if room == 0 and len(self.running) > 1:
                self._preempt()
                continue
            n = min(num_steps, max(1, room), self._first_end() - self._num_steps)
            self.seconds += self.steps_s(len(self.running), self.load, n)
            self.load += n * len(self.running)
            num_steps -= n
            finished += self._decoded(n)
        return finished

    def num_tokens(self, sequence: EmulatedSequence) -> int:
        """Tokens of the prompt and of the response so far."""
        is_running = sequence.trajectory_id in self.running
        return sequence.num_tokens + (self._num_steps - sequence.entered_at if is_running else 0)

    def steps_s(self, num_running: int, load: int, num_steps: int) -> float:
        """Seconds of consecutive decode steps, the cache growing by one token per trajectory and step."""
        e = self.settings
        work = max(e.weights_ms * 1e-3, num_running * e.request_us * 1e-6)
        base = e.step_ms * 1e-3 + work
        tokens = load * num_steps + num_running * num_steps * (num_steps - 1) / 2
        return num_steps * base + tokens * e.kv_ns * 1e-9 + self._host_s(work, num_running, load, num_steps)

    def _host_s(self, work: float, num_running: int, load: int, num_steps: int) -> float:
        """Seconds for which the GPUs wait for the host in these steps: in the first ones, as a step grows with the cache."""
        token_s = self.settings.kv_ns * 1e-9
        missing = self.settings.host_ms * 1e-3 - work - load * token_s
        if missing <= 0:
            return 0.0
        grown = num_running * token_s
        num = min(num_steps, math.ceil(missing / grown)) if grown else num_steps
        return num * missing - grown * num * (num - 1) / 2

    def recompute(self) -> None:
        """Drop the cache: the running trajectories, and those whose keys and values were sent, are prefilled again, in their order."""
        for sequence in self.waiting:
            if sequence.arrives_at and not sequence.num_missing:
                sequence.num_missing = sequence.num_tokens
                sequence.arrives_at = 0.0
                self.num_recomputed += sequence.num_missing
        while self._drop_cache():
            pass
        prompts: set[int] = set()
        running = [self._leave(number) for number in list(self.running)]
        for sequence in running:
            # A prompt is prefilled once for the samples of its group.
            group = trajectory_group(sequence.trajectory_id)
            is_shared = group in prompts
            sequence.num_missing = sequence.num_new if is_shared else sequence.num_tokens
            prompts.add(group)
            self.num_recomputed += sequence.num_missing
        self.waiting.extendleft(reversed(running))

    def remove(self, trajectory_id: int) -> EmulatedSequence | None:
        """Take a trajectory off the device; None if it is not there, or waits for a tool."""
        if trajectory_id in self.running:
            return self._leave(trajectory_id)
        for sequence in self.waiting:
            if sequence.trajectory_id == trajectory_id:
                self.waiting.remove(sequence)
                self._release(sequence)
                return sequence
        return None

    def _enter(self) -> None:
        """Let waiting trajectories run, oldest first, and prefill their missing tokens."""
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            if sequence.arrives_at > self.seconds:
                if self.running:
                    break  # its keys and values arrive beside the decoding of the others
                self.seconds = sequence.arrives_at
            margin = MARGIN_TOKENS * (len(self.running) + 1)
            added = 0 if sequence.holds_cache else sequence.num_tokens
            if self.running and self.load + added + margin > self.settings.kv_tokens:
                if self._drop_cache(besides=sequence):
                    continue
                break
            self.waiting.popleft()
            self._release(sequence)
            self.running[sequence.trajectory_id] = sequence
            sequence.entered_at = self._num_steps
            sequence.stop = self._stop_of(sequence)
            ends_at = self._num_steps + sequence.stop - sequence.num_new
            heapq.heappush(self._ends, (ends_at, sequence.trajectory_id))
            self.load += sequence.num_tokens
            self.seconds += sequence.num_missing * self.settings.prefill_us * 1e-6
            sequence.num_missing = 0

    def _preempt(self) -> None:
        sequence = self._leave(next(reversed(self.running)))
        sequence.num_missing = sequence.num_tokens
        self.num_recomputed += sequence.num_missing
        self.waiting.appendleft(sequence)
        self.num_preempted += 1

    def _decoded(self, num_steps: int) -> list[EmulatedSequence]:
        self._num_steps += num_steps
        self.num_sampled += num_steps * len(self.running)
        finished: list[EmulatedSequence] = []
        while self.running and self._first_end() <= self._num_steps:
            sequence = self._leave(self._ends[0][1])
            if sequence.num_new < sequence.limit:
                self._pause(sequence)
            else:
                finished.append(sequence)
        return finished

    def _stop_of(self, sequence: EmulatedSequence) -> int:
        """Tokens of the response at which its next turn ends."""
        turns = self.settings.turns
        ends = (sequence.limit * turn // turns for turn in range(1, turns + 1))
        return next(end for end in ends if end > sequence.num_new or end == sequence.limit)

    def _pause(self, sequence: EmulatedSequence) -> None:
        number = sequence.trajectory_id
        self.paused[number] = sequence
        self.load += sequence.num_tokens
        seconds = tool_seconds(self._seed, number, sequence.num_new, self.settings)
        heapq.heappush(self._answers, (self.seconds + seconds, number))

    def _take_answers(self) -> None:
        """Queue the trajectories whose tools have answered."""
        while self._answers and self._answers[0][0] <= self.seconds:
            sequence = self.paused.pop(heapq.heappop(self._answers)[1])
            sequence.holds_cache = not sequence.num_missing
            self.waiting.append(sequence)

    def _drop_cache(self, besides: EmulatedSequence | None = None) -> bool:
        """Drop the cache of the newest trajectory that waits for a tool, or else for its place after one; False if none has one."""
        answered = (sequence for sequence in reversed(self.waiting) if sequence.holds_cache and sequence is not besides)
        for sequence in (*reversed(self.paused.values()), *answered):
            if not sequence.num_missing:
                sequence.num_missing = sequence.num_tokens
                sequence.holds_cache = False
                self.num_recomputed += sequence.num_missing
                self.load -= sequence.num_tokens
                return True
        return False

    def _release(self, sequence: EmulatedSequence) -> None:
        """Take the tokens of a trajectory that leaves the queue with its cache out of `load`."""
        if sequence.holds_cache:
            self.load -= sequence.num_tokens
            sequence.holds_cache = False

    def _leave(self, trajectory_id: int) -> EmulatedSequence:
        """Take a trajectory out of the batch."""
        sequence = self.running.pop(trajectory_id)
        sequence.num_new += self._num_steps - sequence.entered_at
        self.load -= sequence.num_tokens
        return sequence

    def _first_end(self) -> int:
        """The decode step at which the first of the running trajectories is finished."""
        while True:
            end, number = self._ends[0]
            sequence = self.running.get(number)
            if sequence is not None and sequence.entered_at + sequence.stop - sequence.num_new == end:
                return end
            heapq.heappop(self._ends)


def tool_seconds(seed: int, trajectory_id: int, num_new: int, settings: LabSettings) -> float:
    """Seconds of the tool that a trajectory asks after so many tokens: a function of these numbers alone."""
    random = np.random.default_rng([seed, trajectory_id & (1 << 63) - 1, num_new])
    return settings.tool_s * math.exp(math.log(TOOL_P99) / 2.3263 * random.standard_normal())


def response_length(seed: int, trajectory_id: int, settings: LabSettings, longest: int) -> int:
    """The length of a trajectory's response: log-normal or one of `lengths`, a function of (seed, trajectory id) alone."""
    random = np.random.default_rng([seed, trajectory_id & (1 << 63) - 1])
    if settings.lengths:
        return min(longest, settings.lengths[random.integers(len(settings.lengths))])
    sigma = math.log(settings.p99_over_median) / 2.3263  # the normal distribution's 99th percentile
    draw = random.standard_normal()
    return max(1, min(longest, round(settings.median_tokens * math.exp(sigma * draw))))
