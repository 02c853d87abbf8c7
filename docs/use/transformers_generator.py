"""Transformers' own continuous batching as a generator: `rollout.engine=docs/use/transformers_generator.py:TransformersGenerator`.

An example of an adapter (`rollout/generators/base.py`). It has to run prompts, report the log-probabilities of its samples, and take new weights.
`generate_batch` does the first two. Its log-probabilities are those of the filtered distribution, so with a filter they are
computed again by the policy. The parameters are views of the rollout's weights, so that a new version replaces them in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from headrace.comm.errors import SettingError
from headrace.comm.fleet import Fleet
from headrace.comm.messages.weights import WeightsPulled
from headrace.comm.recipe import Recipe
from headrace.rollout.engine.chat_template import prompt_tokens
from headrace.rollout.engine.sampling import SamplingParams
from headrace.rollout.engine.sequence import Completion, SequenceProgress, SequenceState
from headrace.rollout.weights import RolloutWeights
from headrace.trainer.policy.model import default_device, load_policy, load_tokenizer

_BLOCK_TOKENS = 256  # of the KV cache; transformers' own default
_BATCH_TOKENS = 512  # more only enlarges the dense mask on CPU


@dataclass(frozen=True, slots=True)
class _Request:
    trajectory_id: int
    prompt_ids: list[int]
    params: SamplingParams


class TransformersGenerator:
    """Runs queued requests batch by batch; one `step` generates a batch from its first token to its last."""

    can_migrate = False
    can_stream = False
    profile = None
    num_running = 0
    num_sampled = None
    num_recomputed = 0
    num_prefilled = num_found = 0
    kv_load = 0

    def __init__(self, fleet: Fleet, recipe: Recipe) -> None:
        if recipe.generator.exact or recipe.lora.rank:
            raise SettingError("rollout.engine: transformers' batching supports neither generator.exact nor lora.rank")
        self._data = recipe.data
        self.tokenizer = load_tokenizer(recipe.model.path)
        self.policy = load_policy(recipe.model.path, recipe.model.compute_type, weights=False)
        self.weights = RolloutWeights(fleet, self.policy, recipe.comm, recipe.run.dir, device=default_device())
        self.policy.model.set_attn_implementation("sdpa")
        self.context = self.policy.context
        self.max_running = recipe.generator.num_slots
        self.kv_capacity = self.max_running * self.context
        vector_bytes = self.policy.head_dim * self.policy.dtype.itemsize
        self.kv_token_bytes = 2 * self.policy.num_layers * self.policy.num_kv_heads * vector_bytes
        self.recomputed: dict[str, int] = {}
        self._queue: list[_Request] = []
        self._seed = recipe.run.seed + 1000 * fleet.me.index

    @property
    def num_waiting(self) -> int:
        """All requests: between two steps none runs."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        return not self._queue

    def prompt_ids(self, row: dict[str, Any]) -> list[int]:
        return prompt_tokens(row, self.tokenizer, self._data)

    def add_group(self, prompt_ids: list[int], params: SamplingParams, trajectory_ids: Sequence[int]) -> None:
        """Raises `SettingError` for parameters that `generate_batch` does not support."""
        if params.stop or params.min_p or params.repetition_penalty != 1.0:
            raise SettingError(
                "rollout.engine: transformers' batching supports no sampling.stop, sampling.min_p or sampling.repetition_penalty"
            )
        self._queue += [_Request(trajectory_id, prompt_ids, params) for trajectory_id in trajectory_ids]

    def step(self) -> list[Completion]:
        """Generate the oldest request to its end, in a batch with others of the same parameters and limit."""
        first = self._queue[0]
        params = first.params
        limit = self._limit(first)
        batch = [r for r in self._queue if r.params == params and self._limit(r) == limit][: self.max_running]
        chosen = {request.trajectory_id for request in batch}
        self._queue = [request for request in self._queue if request.trajectory_id not in chosen]
        self._seed += 1
        model: Any = self.policy.model
        outputs: dict[str, Any] = model.generate_batch(
            [request.prompt_ids for request in batch],
            generation_config=self._sampling(params, limit),
            continuous_batching_config=self._batching(batch, limit),
        )
        assert len(outputs) == len(batch), f"generate_batch gave {len(outputs)} of {len(batch)} responses"
        return [self._completion(*pair) for pair in zip(batch, outputs.values(), strict=True)]

    def unfinished(self) -> list[SequenceProgress]:
        return [SequenceProgress(request.trajectory_id, len(request.prompt_ids)) for request in self._queue]

    def responses(self) -> list[SequenceState]:
        raise AssertionError("`can_stream` is False")

    def take_weights(self, deadline_s: float, version: int | None = None) -> WeightsPulled:
        return self.weights.pull(deadline_s)

    def export_sequences(self, trajectory_ids: Sequence[int], with_cache: bool = False) -> list[SequenceState]:
        raise AssertionError("`can_migrate` is False")

    def import_sequences(self, states: Sequence[SequenceState]) -> None:
        raise AssertionError("`can_migrate` is False")

    def close(self) -> None:
        self.weights.close()

    def _limit(self, request: _Request) -> int:
        return min(request.params.max_new_tokens, self.context - len(request.prompt_ids))

    def _sampling(self, params: SamplingParams, limit: int) -> GenerationConfig:
        stop_ids = sorted(self.policy.stop_ids) or -1
        greedy = params.temperature == 0
        drawn = {} if greedy else {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        return GenerationConfig(
            do_sample=not greedy, max_new_tokens=limit, pad_token_id=0, eos_token_id=stop_ids, **drawn
        )

    def _batching(self, batch: Sequence[_Request], limit: int) -> ContinuousBatchingConfig:
        longest = max(len(request.prompt_ids) for request in batch) + limit
        wanted = {"return_logprobs": True, "max_requests_per_batch": self.max_running, "seed": self._seed}
        if self.policy.device.type == "cpu":
            # By default it sizes its cache and mask by the machine's memory.
            blocks = len(batch) * -(-longest // _BLOCK_TOKENS)
            wanted |= {"num_blocks": blocks, "max_batch_tokens": max(_BATCH_TOKENS, len(batch))}
        known = signature(ContinuousBatchingConfig).parameters  # they differ between versions of transformers
        return ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known})

    def _completion(self, request: _Request, output: Any) -> Completion:
        token_ids = list(output.generated_tokens)
        ended = bool(token_ids) and token_ids[-1] in self.policy.stop_ids
        reason = "stop" if ended else "length"
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        logprobs = list(output.logprobs) if request.params.is_plain else self._logprobs(request, token_ids)
        return Completion(request.trajectory_id, request.prompt_ids, token_ids, logprobs, reason, text=text)

    @torch.inference_mode()
    def _logprobs(self, request: _Request, token_ids: list[int]) -> list[float]:
        """The log-probability of each token of a response, under the policy at the sampling temperature."""
        tokens = torch.tensor([request.prompt_ids + token_ids], device=self.policy.device)
        hidden = self.policy.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
        rows = hidden[len(request.prompt_ids) - 1 : -1]
        targets = tokens[0, len(request.prompt_ids) :]
        return self.policy.token_logprobs(rows, targets, request.params.temperature or 1.0)[0].tolist()
