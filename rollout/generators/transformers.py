"""Transformers' own continuous batching behind the adapter's protocol: `rollout.engine=transformers`.

The example of a generator that somebody brings along: about all it needs is to run prompts, to tell the log-probability of
what it sampled, and to take new weights. Here `generate_batch` does the first two (its log-probabilities are those of the
processed distribution, as ours), and the parameters are views of the rollout's weights, so that a version is taken in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ...comm.errors import SettingError
from ...comm.fleet import Fleet
from ...comm.recipe import Recipe
from ...relay.weights.slots import Receipt
from ...trainer.policy.model import default_device, load_policy, load_tokenizer
from ..engine.sampling import SamplingParams
from ..engine.sequence import Completion, SequenceProgress, SequenceState
from ..engine.text import prompt_tokens
from ..weights import RolloutWeights

_BLOCK_TOKENS = 256  # of the KV cache; transformers' own default
_BATCH_TOKENS = 512  # more only enlarges the dense mask that it makes on CPU


@dataclass(frozen=True, slots=True)
class _Request:
    trajectory_id: int
    prompt_ids: list[int]
    params: SamplingParams


class TransformersGenerator:
    """Runs what is queued batch by batch, each from its first token to its last within one `step`."""

    can_migrate = False
    num_running = 0
    num_recomputed = 0
    kv_load = 0

    def __init__(self, fleet: Fleet, recipe: Recipe) -> None:
        if recipe.generator.exact or recipe.rollout.tp > 1:
            raise SettingError("rollout.engine=transformers has neither generator.exact nor rollout.tp")
        self.tokenizer = load_tokenizer(recipe.model.path)
        self.policy = load_policy(recipe.model.path, recipe.model.dtype, weights=False)
        self.weights = RolloutWeights(fleet, self.policy, recipe.comm, recipe.run.dir, device=default_device())
        self.policy.model.set_attn_implementation("sdpa")
        self.context = self.policy.context
        self.max_running = recipe.generator.max_running
        self.kv_capacity = self.max_running * self.context
        config = self.policy.config
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.kv_token_bytes = 2 * config.num_hidden_layers * heads * head_dim * self.policy.dtype.itemsize
        self._queue: list[_Request] = []
        self._seed = recipe.run.seed + 1000 * fleet.me.index

    @property
    def num_waiting(self) -> int:
        """All that is queued: between two steps nothing runs."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Nothing is queued."""
        return not self._queue

    def prompt_ids(self, row: dict[str, Any]) -> list[int]:
        """Token ids of a row's prompt."""
        return prompt_tokens(row, self.tokenizer)

    def add_group(self, prompt_ids: list[int], params: SamplingParams, trajectory_ids: Sequence[int]) -> None:
        """Queue one sample per trajectory id. Raises `SettingError` for what `generate_batch` cannot do."""
        if params.stop or params.min_p or params.repetition_penalty != 1.0:
            raise SettingError(
                "rollout.engine=transformers knows no sampling.stop, sampling.min_p or sampling.repetition_penalty"
            )
        self._queue += [_Request(trajectory_id, prompt_ids, params) for trajectory_id in trajectory_ids]

    def step(self) -> list[Completion]:
        """Generate the oldest requests with the same parameters and room for as many tokens, to their ends."""
        first = self._queue[0]
        params, limit = first.params, self._limit(first)
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
        """What is queued."""
        return [SequenceProgress(request.trajectory_id, len(request.prompt_ids)) for request in self._queue]

    def take_weights(self, deadline_s: float) -> Receipt:
        """The newest version, into the memory that the parameters are views of; nothing is half generated here."""
        return self.weights.pull(deadline_s)

    def export_sequences(self, trajectory_ids: Sequence[int], with_cache: bool = False) -> list[SequenceState]:
        """Never called: `can_migrate` is False."""
        raise NotImplementedError

    def import_sequences(self, states: Sequence[SequenceState]) -> None:
        """Never called: `can_migrate` is False."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the relay's memory."""
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
        wanted = {
            "return_logprobs": True,
            "max_requests_per_batch": self.max_running,
            "seed": self._seed,
        }
        if self.policy.device.type == "cpu":
            # Left alone it sizes its cache and mask by the machine's memory.
            blocks = len(batch) * -(-longest // _BLOCK_TOKENS)
            wanted |= {"num_blocks": blocks, "max_batch_tokens": max(_BATCH_TOKENS, len(batch))}
        known = signature(ContinuousBatchingConfig).parameters  # differs between versions of transformers
        return ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known})

    def _completion(self, request: _Request, output: Any) -> Completion:
        token_ids = list(output.generated_tokens)
        ended = bool(token_ids) and token_ids[-1] in self.policy.stop_ids
        return Completion(
            request.trajectory_id,
            request.prompt_ids,
            token_ids,
            list(output.logprobs),
            "stop" if ended else "length",
            text=self.tokenizer.decode(token_ids, skip_special_tokens=True),
        )
