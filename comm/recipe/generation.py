"""`sampling`, `generator` and `rollout`: how tokens are drawn, and by which engine."""

from typing import Annotated, Literal

from msgspec import Struct

from ..errors import SettingError
from .fields import Count, NotNegative, OptionalCount, Positive, ShareBelowOne, SomeShare, words

LEAST_TEMPERATURE = 1e-5
"""A lower one, except 0, could make logits infinite, which have no softmax."""


class SamplingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sampling.*`: how tokens are drawn."""

    max_new_tokens: Count = 256
    """Longest response in tokens."""
    temperature: NotNegative = 1.0
    """Divisor of the logits; 0 takes the most probable token."""
    top_p: SomeShare = 1.0
    """Draw from the most probable tokens whose probabilities sum to this (1 is off)."""
    top_k: OptionalCount = 0
    """Draw from this many most probable tokens (0 is off)."""
    min_p: ShareBelowOne = 0.0
    """Draw from tokens with at least this fraction of the highest probability (0 is off)."""
    repetition_penalty: Positive = 1.0
    """Lowers the scores of tokens that already occur in prompt or response by this factor (1 is off)."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the policy's stop tokens."""

    def __post_init__(self) -> None:
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise SettingError(f"sampling.temperature: set 0 (greedy) or at least {LEAST_TEMPERATURE:g}")
        if "" in self.stop:
            raise SettingError("sampling.stop: an empty string would end every response at once; leave it out")


class GeneratorSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`generator.*`: the engine of one rollout."""

    max_running: Count | None = None
    """Trajectories that are decoded together. Null is 32 on a CPU; on a GPU as many of the longest responses as the KV cache holds, at most 128."""
    kv_gb: NotNegative | None = None
    """GB of the KV cache. Null is the rest of `gpu_share`; on a CPU what `max_running` trajectories need, at most half of the free memory."""
    gpu_share: SomeShare = 0.85
    """Fraction of its GPU's memory that a rollout may use."""
    prefill_tokens: Count = 2048
    """Most prompt tokens that are prefilled in one step."""
    exact: bool = False
    """Make the log-probabilities of generator and trainer equal bit for bit (Llama, Qwen2, Qwen3, Mistral, Phi-3)."""
    attention: str = "auto"
    """Attention backend of decoding: `auto`, or the name of one (docs/use/generator.md)."""

    @property
    def num_slots(self) -> int:
        """`max_running`, or the default of CPUs; the start of a run has set it for GPUs."""
        return self.max_running or 32


class RolloutSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`rollout.*`: the cycle of one rollout."""

    engine: Annotated[str, words("builtin", "vllm", "emulated")] = "builtin"
    """The generator: the project's own, vLLM, an emulated device (`headrace plan --help`), or your own adapter (docs/use/engines.md)."""
    max_age: Literal["never"] | Count | None = None
    """When a rollout takes new weights in the middle of its trajectories: null: where the trainer starves for it; a number: also if its weights are further behind the newest; `never`."""
    stream_tokens: OptionalCount = 256
    """If a rollout dies, others continue its trajectories and generate at most this many tokens of each again; 0 is off."""
    tp: Count = 1
    """Tensor-parallel ranks of one replica of the generator; `roles.rollout` is a multiple of it."""
    serve: str = ""
    """PORT or HOST:PORT: the run's rollouts also answer OpenAI's HTTP API there (docs/use/serving.md); 0 takes a free port; empty is off."""
    threads: Count | None = None
    """Threads of each rank of a rollout; null chooses by the host's cores and the other processes there."""
