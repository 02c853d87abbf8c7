"""Samples from several versions of the weights with one engine, which holds one of them at a time.

A *target* is what a client samples from: weights that stay (a snapshot, or the initial ones), or weights that later ones replace
(`Target.replace`). Sequences of one target run together; the engine takes the weights of another one when they have ended. Where a
target's own weights are replaced, its sequences go on under the new ones, with keys and values computed again.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ...comm.errors import SettingError
from ...trainer.policy.lora import ALL_LINEAR, A, B, merged, target_layers
from ..engine.engine import Engine
from ..engine.sampling import SamplingParams
from ..engine.sequence import Completion, SequenceState
from ..engine.streams import stream_key

PATIENCE_S = 2.0
"""Time for which sequences of one target may keep those of another one waiting by new ones."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightVersion:
    """Weights with the number that names them.

    weights: by name, those of an adapter (`scaling` is alpha / rank then), or all; empty for the initial ones.
    """

    number: int
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    scaling: float = 0.0


class Target:
    """What is sampled from."""

    def __init__(self, version: WeightVersion | Callable[[], WeightVersion]) -> None:
        """version: or what reads it from the disk, in the thread of the engine at the first sample."""
        self._version = version

    def version(self) -> WeightVersion:
        """The present weights. Raises `SettingError` where they cannot be read."""
        if not isinstance(self._version, WeightVersion):
            self._version = self._version()
        return self._version

    def replace(self, version: WeightVersion | Callable[[], WeightVersion]) -> None:
        """From now on sample from other weights."""
        self._version = version


@dataclass(frozen=True, slots=True)
class Sampled:
    """One response, with the number of the weights that drew each token."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The responses to a prompt; prompt_logprobs [tokens of the prompt] float32, NaN where there is none; None if nobody asked."""

    responses: list[Sampled]
    prompt_logprobs: np.ndarray | None = None


@dataclass(slots=True, eq=False)
class SampleJob:
    """A prompt with `params.n` responses. `finish` gets the result or an error, in the thread of the engine."""

    target: Target
    prompt: list[int]
    params: SamplingParams
    finish: Callable[[SampleResult | Exception], None]
    num_scored: int = 0
    """Tokens at the end of the prompt whose log-probs are wanted."""
    since: float = 0.0
    _ends: dict[int, Sampled] = field(default_factory=dict)
    _prompt_logprobs: np.ndarray | None = None

    def add(self, sample: int, end: Sampled) -> bool:
        """Take a response; the last one finishes the job. Returns whether it was the last."""
        self._ends[sample] = end
        is_last = len(self._ends) == self.params.n
        if is_last:
            self.finish(SampleResult([self._ends[i] for i in range(self.params.n)], self._prompt_logprobs))
        return is_last

    def score(self, engine: Engine) -> None:
        """Compute the log-probs of the prompt, at temperature 1."""
        self._prompt_logprobs = prompt_logprobs(engine, self.prompt, self.num_scored)


@dataclass(slots=True)
class _Running:
    """A sequence of a job in the engine."""

    job: SampleJob
    sample: int
    switches: list[tuple[int, int]]
    """From which token on which weights drew."""


class Samplers:
    """Jobs that wait or run. `submit` and `cancel` may be called in any thread, `turn` in that of the engine."""

    def __init__(self, engine: Engine) -> None:
        """engine: its policy has the initial weights."""
        self.engine = engine
        self.has_work = threading.Event()
        """Set when there is something new; who waits for it clears it before it looks."""
        self._weights = _EngineWeights(engine)
        self._new: deque[SampleJob] = deque()
        self._cancelled: deque[SampleJob] = deque()
        self._waiting: list[SampleJob] = []
        self._running: dict[int, _Running] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._open: dict[SampleJob, int] = {}
        self._target: Target | None = None
        self.initial = Target(self._weights.version)
        """The initial weights."""

    @property
    def num_samples(self) -> int:
        """Responses of jobs that have not ended."""
        with self._lock:
            return sum(self._open.values())

    def submit(self, job: SampleJob) -> None:
        """Queue a job."""
        job.since = time.monotonic()
        with self._lock:
            self._open[job] = job.params.n
        self._new.append(job)
        self.has_work.set()

    def cancel(self, job: SampleJob) -> None:
        """Drop a job, which may have ended; it does not finish then."""
        self._close(job)
        self._cancelled.append(job)
        self.has_work.set()

    def turn(self) -> bool:
        """Begin and drop sequences, and take a step of the engine; False if there was nothing to do."""
        self._take_orders()
        if self.engine.idle:
            if not self._waiting:
                return False
            self._target = self._waiting[0].target
        assert self._target is not None, "what runs has a target"
        if not self._use(self._target):
            return True
        self._begin()
        for done in self.engine.step():
            self._end(done)
        return True

    # --------------------------------------------------------------------------------------------------------- internals

    def _close(self, job: SampleJob) -> None:
        with self._lock:
            self._open.pop(job, None)

    def _take_orders(self) -> None:
        # In this order: what is cancelled was submitted before.
        gone: set[SampleJob] = set()
        while self._cancelled:
            gone.add(self._cancelled.popleft())
        while self._new:
            self._waiting.append(self._new.popleft())
        if not gone:
            return
        self._waiting = [job for job in self._waiting if job not in gone]
        numbers = {number for number, running in self._running.items() if running.job in gone}
        for number in numbers:
            del self._running[number]
        # One that has just ended is in no list of unfinished ones; the next step returns it, and it is dropped there.
        live = [state.trajectory_id for state in self.engine.unfinished() if state.trajectory_id in numbers]
        self.engine.export_sequences(live)

    def _use(self, target: Target) -> bool:
        """Give the engine the weights of a target; False where they cannot be read, which ends the jobs that wait for them."""
        try:
            version = target.version()
        except (SettingError, OSError) as error:
            failed = [job for job in self._waiting if job.target is target]
            self._waiting = [job for job in self._waiting if job.target is not target]
            for job in failed:
                self._close(job)
                job.finish(error)
            return bool(self._running)  # these have begun with weights that are in the engine
        if self._weights.version is not version:
            self.engine.recompute()
            for state in self.engine.responses():
                if (running := self._running.get(state.trajectory_id)) is not None:
                    running.switches.append((len(state.token_ids), version.number))
            self._weights.take(version)
        return True

    def _begin(self) -> None:
        """Begin the waiting jobs of the target in use, unless another one's have waited long enough."""
        others = [job for job in self._waiting if job.target is not self._target]
        if self._running and others and time.monotonic() - others[0].since > PATIENCE_S:
            return
        mine = [job for job in self._waiting if job.target is self._target]
        self._waiting = others
        for job in mine:
            if job.num_scored:
                job.score(self.engine)
            self._import(job)

    def _import(self, job: SampleJob) -> None:
        assert job.params.seed is not None
        one = replace(job.params, n=1)
        states: list[SequenceState] = []
        for sample in range(job.params.n):
            number = next(self._numbers)
            self._running[number] = _Running(job, sample, [(0, self._weights.version.number)])
            states.append(SequenceState(number, stream_key(job.params.seed, sample), one, list(job.prompt), [], []))
        self.engine.import_sequences(states)

    def _end(self, done: Completion) -> None:
        running = self._running.pop(done.trajectory_id, None)
        if running is None:
            return  # it was dropped in the step that ended it
        if done.finish_reason == "error":
            self.cancel(running.job)
            running.job.finish(SettingError("the model's logits are not finite"))
            return
        bounds = [*(start for start, _ in running.switches[1:]), len(done.token_ids)]
        versions: list[int] = []
        for (_, number), end in zip(running.switches, bounds, strict=True):
            versions += [number] * (end - len(versions))
        end = Sampled(list(done.token_ids), list(done.logprobs), versions, done.finish_reason)
        if running.job.add(running.sample, end):
            self._close(running.job)


class _EngineWeights:
    """The weights of an engine's policy, overwritten in place by versions of them."""

    def __init__(self, engine: Engine) -> None:
        self.version = WeightVersion(0)
        self._engine = engine
        policy = engine.policy
        self._layers = target_layers(policy.model, ALL_LINEAR)
        self._first = {name: weight.detach().to("cpu", copy=True) for name, weight in policy.weights().items()}
        """The initial weights, in host memory."""

    @torch.no_grad()
    def take(self, version: WeightVersion) -> None:
        """Overwrite the weights; the engine has dropped what it computed with those before."""
        given = version.weights
        for name, weight in self._engine.policy.weights().items():
            layer = name.removesuffix(".weight")
            if f"{layer}.{A}" in given and layer in self._layers:
                a, b = (given[f"{layer}.{matrix}"].to(weight.device) for matrix in (A, B))
                weight.copy_(merged(self._first[name].to(weight.device), a, b, version.scaling))
            else:
                weight.copy_(given.get(name, self._first[name]))
        self._engine.weights_changed()
        self.version = version


@torch.no_grad()
def prompt_logprobs(engine: Engine, prompt: Sequence[int], num_scored: int) -> np.ndarray:
    """Log-probs of the last `num_scored` tokens of a prompt under the engine's present weights, float32; NaN for the others."""
    policy = engine.policy
    token_ids = torch.tensor(prompt, device=policy.device)
    hidden = policy.forward_packed(token_ids, torch.tensor([0, len(prompt)], dtype=torch.int32))
    found = np.full(len(prompt), np.nan, np.float32)
    start = max(1, len(prompt) - num_scored)
    if start < len(prompt):
        scored = policy.token_logprobs(hidden[start - 1 : -1], token_ids[start:], 1.0)[0]
        found[start:] = scored.float().cpu().numpy()
    return found
