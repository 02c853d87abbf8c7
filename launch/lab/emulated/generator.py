"""A generator on an emulated device: `rollout.engine=emulated`. Time passes and tokens are counted; nothing is computed."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ....comm.clock import REAL_TIME, Clock
from ....comm.fleet import Fleet
from ....comm.messages.weights import WeightsPulled
from ....comm.recipe import Recipe
from ....comm.shared_memory import host_buffer
from ....relay.weights.layout import Layout
from ....relay.weights.reader import WeightReader
from ....rollout.engine.sampling import SamplingParams
from ....rollout.engine.sequence import Completion, SequenceProgress, SequenceState
from ....rollout.generators.base import GeneratorProfile
from ..settings import lab_of
from .device import EmulatedDevice, EmulatedSequence, response_length
from .transfer import EmulatedTransfer, dummy_weights


class Reader(Protocol):
    """The end of the weights' way, as `WeightReader` is one."""

    def newest(self) -> int | None: ...

    def pull(self, into: np.ndarray, deadline_s: float) -> WeightsPulled: ...

    def pull_version(self, version: int, into: np.ndarray) -> WeightsPulled: ...

    def close(self) -> None: ...


class EmulatedWeights:
    """A small buffer that is really pulled; a version is available once it would have passed the chain of relays."""

    def __init__(self, reader: Reader, layout: Layout, clock: Clock, chain_s: float) -> None:
        self.version = -1
        self._reader = reader
        self._buffer = host_buffer(layout.num_bytes)
        self._clock = clock
        self._chain_s = chain_s
        self._pending: dict[int, float] = {}
        """Versions on their way, with the time at which each becomes available."""
        self._newest = -1

    @property
    def next_at(self) -> float:
        """When the next version on its way becomes available; infinite without one."""
        return min(self._pending.values(), default=math.inf)

    def newest(self) -> int:
        shown = self._reader.newest()
        now = self._clock.now()
        if shown is not None and shown > self._newest:
            self._pending.setdefault(shown, now + self._chain_s)
        self._newest = max([self._newest, *(version for version, at in self._pending.items() if at <= now)])
        self._pending = {version: at for version, at in self._pending.items() if at > now}
        return self._newest

    def pull(self, deadline_s: float, version: int | None = None) -> WeightsPulled:
        """The newest version, or the one that is named."""
        if version is None:
            pulled = self._reader.pull(self._buffer, deadline_s)
        else:
            pulled = self._reader.pull_version(version, self._buffer)
        self.version = pulled.version
        self._newest = max(self._newest, pulled.version)
        return pulled

    def close(self) -> None:
        self._reader.close()


class EmulatedGenerator:
    """An emulated device, a clock, and small weights."""

    can_migrate = True
    can_stream = False
    """Its tokens are zeros and not worth keeping. A simulation turns this on, to test the partial pool."""
    num_prefilled = num_found = 0
    recomputed: Mapping[str, int] = {}

    def __init__(self, fleet: Fleet, recipe: Recipe, clock: Clock | None = None, reader: Reader | None = None) -> None:
        self.settings = e = lab_of(recipe.lab)
        self.seed = recipe.run.seed
        self.clock = clock or REAL_TIME
        self.transfer = EmulatedTransfer(e, recipe.run.schedule)
        layout = Layout.of(dummy_weights(), torch.float32)
        reader = reader or WeightReader(fleet, layout, recipe.comm)
        self.weights = EmulatedWeights(reader, layout, self.clock, self.transfer.chain_s)
        self.device = EmulatedDevice(e, recipe.generator.num_slots, recipe.run.seed)
        self.profile = None if e.batch_bound is None else GeneratorProfile(e.batch_bound, math.inf)
        self.context = 1 << 30
        self.kv_capacity = e.kv_tokens
        self.kv_token_bytes = e.kv_token_bytes
        self._until = self.clock.now()
        """Time at which the device finishes its present work."""
        self._params: dict[int, SamplingParams] = {}

    @property
    def num_running(self) -> int:
        return len(self.device.running)

    @property
    def num_waiting(self) -> int:
        return len(self.device.waiting)

    @property
    def num_recomputed(self) -> int:
        return self.device.num_recomputed

    @property
    def num_sampled(self) -> int:
        """Tokens drawn so far."""
        return self.device.num_sampled

    @property
    def idle(self) -> bool:
        return not (self.device.running or self.device.waiting or self.device.paused)

    @property
    def kv_load(self) -> int:
        return self.device.load

    def prompt_ids(self, row: dict[str, Any]) -> list[int]:
        return [0] * self.settings.prompt_tokens

    def add_group(self, prompt_ids: list[int], params: SamplingParams, trajectory_ids: Sequence[int]) -> None:
        self._start_if_idle()
        sequences = [self._sequence(number, len(prompt_ids), params) for number in trajectory_ids]
        sequences[0].num_missing = len(prompt_ids)  # the group prefills its prompt once
        self.device.add(sequences)

    def step(self) -> list[Completion]:
        """Run `lab.stretch` decode steps; returns at the time when they end."""
        before = self.device.seconds
        finished = self.device.advance(self.settings.stretch)
        self._sleep_for(self.device.seconds - before)
        return [self._completion(sequence) for sequence in finished]

    def unfinished(self) -> list[SequenceProgress]:
        device = self.device
        unfinished = (*device.running.values(), *device.waiting, *device.paused.values())
        totals = ((sequence, device.num_tokens(sequence)) for sequence in unfinished)
        return [SequenceProgress(s.trajectory_id, total, total - s.num_prompt) for s, total in totals]

    def responses(self) -> list[SequenceState]:
        states: list[SequenceState] = []
        for sequence in (*self.device.running.values(), *self.device.waiting, *self.device.paused.values()):
            num_tokens = self.device.num_tokens(sequence) - sequence.num_prompt
            number = sequence.trajectory_id
            tokens = ([0] * sequence.num_prompt, [0] * num_tokens, [0.0] * num_tokens)
            states.append(SequenceState(number, 0, self._params[number], *tokens))
        return states

    def take_weights(self, deadline_s: float, version: int | None = None) -> WeightsPulled:
        self._start_if_idle()
        self.device.recompute()
        pulled = self.weights.pull(deadline_s, version)
        self._sleep_for(self.transfer.pull_s)
        return pulled

    def export_sequences(self, trajectory_ids: Sequence[int], with_cache: bool = False) -> list[SequenceState]:
        """The exported cache is a tensor of one number."""
        states: list[SequenceState] = []
        for number in trajectory_ids:
            sequence = self.device.remove(number)
            if sequence is None:
                continue
            is_sent = with_cache and self.settings.kv_gb_s is not None and not sequence.num_missing
            cache = torch.zeros(1) if is_sent else None
            prompt, tokens, logprobs = _content(sequence)
            states.append(SequenceState(number, 0, self._params.pop(number), prompt, tokens, logprobs, cache))
        return states

    def import_sequences(self, states: Sequence[SequenceState]) -> None:
        """The keys and values of a sequence arrive beside decoding, or are computed again."""
        self._start_if_idle()
        for state in states:
            sequence = self._sequence(state.trajectory_id, len(state.prompt_ids), state.params)
            sequence.num_new = len(state.token_ids)
            if state.cache is not None:
                self.device.receive(sequence)
            else:
                sequence.num_missing = sequence.num_tokens
                self.device.add([sequence])

    def close(self) -> None:
        self.weights.close()

    def _sequence(self, number: int, num_prompt: int, params: SamplingParams) -> EmulatedSequence:
        self._params[number] = params
        limit = response_length(self.seed, number, self.settings, params.max_new_tokens)
        return EmulatedSequence(number, num_prompt, limit)

    def _completion(self, sequence: EmulatedSequence) -> Completion:
        params = self._params.pop(sequence.trajectory_id)
        reason = "length" if sequence.num_new >= params.max_new_tokens else "stop"
        return Completion(sequence.trajectory_id, *_content(sequence), reason)

    def _start_if_idle(self) -> None:
        """Let an idle device begin its next work now."""
        if self.idle:
            self._until = self.clock.now()

    def _sleep_for(self, seconds: float) -> None:
        """Return after `seconds` more of the device's own time, so that one late wake-up delays no later step."""
        self._until += seconds
        self.clock.sleep_until(self._until)


def _content(sequence: EmulatedSequence) -> tuple[list[int], list[int], list[float]]:
    """Prompt tokens, response tokens and log-probabilities: zeros of the right lengths."""
    return [0] * sequence.num_prompt, [0] * sequence.num_new, [0.0] * sequence.num_new
