"""A generator whose device is emulated: `rollout.engine=emulated`. Time passes, tokens are counted, nothing is computed."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from ...comm.clock import Clock
from ...comm.fleet import Fleet
from ...comm.recipe import Recipe
from ...relay.weights.emulated import EmulatedTransfer, dummy_weights
from ...relay.weights.layout import Layout, host_buffer
from ...relay.weights.reader import WeightReader
from ...relay.weights.slots import Receipt
from ..engine.sampling import SamplingParams
from ..engine.sequence import Completion, SequenceProgress, SequenceState
from .emulated_device import EmulatedDevice, EmulatedSequence, response_length

_log = logging.getLogger(__name__)


class EmulatedWeights:
    """A small buffer that is really pulled; a version can be taken once it would have come down the chain."""

    def __init__(self, fleet: Fleet, recipe: Recipe, clock: Clock, chain_s: float) -> None:
        layout = Layout.of(dummy_weights(recipe.emulated), torch.float32)
        self.version = -1
        self._reader = WeightReader.open(fleet, layout, recipe.comm)
        self._buffer = host_buffer(layout.num_bytes)
        self._clock = clock
        self._chain_s = chain_s
        self._seen: dict[int, float] = {}
        """When the versions that cannot be taken yet can be."""
        self._newest = -1

    def newest(self) -> int:
        """The newest version that would have arrived by now; -1 before the first."""
        shown, now = self._reader.newest(), self._clock.now()
        if shown is not None and shown > self._newest:
            self._seen.setdefault(shown, now + self._chain_s)
        self._newest = max([self._newest, *(version for version, at in self._seen.items() if at <= now)])
        self._seen = {version: at for version, at in self._seen.items() if at > now}
        return self._newest

    def pull(self, deadline_s: float) -> Receipt:
        """Take the newest version."""
        receipt = self._reader.pull(self._buffer, deadline_s)
        self.version = receipt.version
        self._newest = max(self._newest, receipt.version)
        return receipt

    def close(self) -> None:
        """Let go of the relay's memory."""
        self._reader.close()


class EmulatedGenerator:
    """A device, a clock, and small weights."""

    can_migrate = True

    def __init__(self, fleet: Fleet, recipe: Recipe) -> None:
        e = recipe.emulated
        self.settings = e
        self.seed = recipe.run.seed
        self.clock = Clock(e.speed)
        self.transfer = EmulatedTransfer(e, recipe.run.schedule)
        self.weights = EmulatedWeights(fleet, recipe, self.clock, self.transfer.chain_s)
        self.device = EmulatedDevice(e, recipe.generator.max_running)
        self.context = 1 << 30
        self.kv_capacity = e.kv_tokens
        self.kv_token_bytes = e.kv_token_bytes
        self.lag_s = 0.0
        """The most that this process was ever behind its device, in emulated seconds."""
        self._until = self.clock.now()
        """When the device is done with what it was given."""
        self._params: dict[int, SamplingParams] = {}

    @property
    def num_running(self) -> int:
        """Trajectories that decode."""
        return len(self.device.running)

    @property
    def num_waiting(self) -> int:
        """Trajectories that wait for room in the cache."""
        return len(self.device.waiting)

    @property
    def num_recomputed(self) -> int:
        """Tokens so far whose keys and values were given up, to be computed again."""
        return self.device.num_recomputed

    @property
    def idle(self) -> bool:
        """The device holds nothing."""
        return not (self.device.running or self.device.waiting)

    @property
    def kv_load(self) -> int:
        """Tokens in the cache."""
        return self.device.load

    def prompt_ids(self, row: dict[str, Any]) -> list[int]:
        """As many tokens as every prompt has."""
        return [0] * self.settings.prompt_tokens

    def add_group(self, prompt_ids: list[int], params: SamplingParams, trajectory_ids: Sequence[int]) -> None:
        """Queue one sample per trajectory id; the first brings the prompt's prefill along."""
        self._start_if_idle()
        strands = [self._sequence(number, len(prompt_ids), params) for number in trajectory_ids]
        strands[0].num_missing = len(prompt_ids)
        self.device.add(strands)

    def step(self) -> list[Completion]:
        """A stretch of decode steps; returns when they are over."""
        before = self.device.seconds
        finished = self.device.advance(self.settings.stretch)
        self._sleep_for(self.device.seconds - before)
        return [self._completion(strand) for strand in finished]

    def unfinished(self) -> list[SequenceProgress]:
        """Every unfinished trajectory."""
        return [SequenceProgress(s.trajectory_id, s.num_tokens) for s in (*self.device.running, *self.device.waiting)]

    def take_weights(self, deadline_s: float) -> Receipt:
        """Switch to the newest version; what runs is prefilled again under it."""
        self._start_if_idle()
        self.device.recompute()
        receipt = self.weights.pull(deadline_s)
        self._sleep_for(self.transfer.pull_s)
        return receipt

    def export_sequences(self, trajectory_ids: Sequence[int], with_cache: bool = False) -> list[SequenceState]:
        """Remove trajectories; the cache that goes with them is a token of it."""
        parcels: list[SequenceState] = []
        for number in trajectory_ids:
            strand = self.device.remove(number)
            if strand is None:
                continue
            tokens, cache = [0] * strand.num_new, torch.zeros(1) if with_cache and not strand.num_missing else None
            prompt, logprobs = [0] * strand.num_prompt, [0.0] * strand.num_new
            parcels.append(SequenceState(number, 0, self._params.pop(number), prompt, tokens, logprobs, [], cache))
        return parcels

    def import_sequences(self, states: Sequence[SequenceState]) -> None:
        """Go on with trajectories: their keys and values arrive, or are computed again."""
        self._start_if_idle()
        for parcel in states:
            strand = self._sequence(parcel.trajectory_id, len(parcel.prompt_ids), parcel.params)
            strand.num_new = len(parcel.token_ids)
            if parcel.cache is None:
                strand.num_missing = strand.num_tokens
            else:
                strand.wait_s = strand.num_tokens * self.settings.kv_token_bytes / self.settings.kv_gb_s / 1e9
            self.device.add([strand])

    def close(self) -> None:
        """Let go of the relay's memory."""
        _log.info("this process was at most %.2f emulated seconds behind its device", self.lag_s)
        self.weights.close()

    def _sequence(self, number: int, num_prompt: int, params: SamplingParams) -> EmulatedSequence:
        self._params[number] = params
        return EmulatedSequence(
            number, num_prompt, response_length(self.seed, number, self.settings, params.max_new_tokens)
        )

    def _completion(self, sequence: EmulatedSequence) -> Completion:
        params = self._params.pop(sequence.trajectory_id)
        reason = "length" if sequence.num_new >= params.max_new_tokens else "stop"
        prompt, tokens, logprobs = [0] * sequence.num_prompt, [0] * sequence.num_new, [0.0] * sequence.num_new
        return Completion(sequence.trajectory_id, prompt, tokens, logprobs, reason)

    def _start_if_idle(self) -> None:
        """An idle device begins its next work now."""
        if self.idle:
            self._until = self.clock.now()

    def _sleep_for(self, seconds: float) -> None:
        """Return when the device has worked so much longer. Its time is its own, so that being late once costs nothing."""
        self._until += seconds
        self.lag_s = max(self.lag_s, self.clock.sleep_until(self._until))
