"""Settings of generation and rewards."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SamplingSettings:
    """`sampling.*`: how trajectories are drawn."""

    max_new_tokens: int = 256
    """Longest response in tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides the scores of tokens that prompt and response already have (1 is off)."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response, besides the policy's stop tokens."""


@dataclass(slots=True)
class GeneratorSettings:
    """`generator.*`: the engine of one rollout."""

    max_running: int = 32
    """Trajectories decoded together."""
    kv_gb: float | None = None
    """Memory of the KV cache in GB; null is max_running trajectories of full context, as far as half of the free memory goes,
    or on a GPU what is left of `gpu_share`."""
    gpu_share: float = 0.85
    """Share of its GPU's memory that a rollout may fill."""
    prefill_tokens: int = 2048
    """Most prompt tokens that one step prefills."""
    exact: bool = False
    """Log-probabilities of generator and trainer equal bit for bit (CPU; Llama, Qwen2, Qwen3, Mistral, Phi-3)."""
    attention: str = "auto"
    """Attention back-end of decoding: auto, or one by name (see docs/generator.md)."""


@dataclass(slots=True)
class RolloutSettings:
    """`rollout.*`: the cycle of one rollout."""

    engine: str = "builtin"
    """What generates: `builtin`, the project's engine; `transformers`, its continuous batching; `emulated`, a device that only
    takes its time; or an adapter of your own, `FILE.py:CLASS` (see docs/service.md)."""
    report_s: float = 1.0
    """Seconds between two reports of a rollout's load to the hub (emulated ones in an emulated run)."""
    batch_groups: int | None = None
    """Groups that a rollout takes before it drains and looks for a newer version; null means its share of a step (`headrace`) or
    no end (`partial`)."""
    tp: int = 1
    """Ranks of one replica of the generator, each with its part of every layer; `roles.rollout` is a multiple of it."""


@dataclass(slots=True)
class RewardSettings:
    """`reward.*`: the user's reward function."""

    path: str = ""
    """`FILE.py:FUNCTION`, called as f(prompts=, completions=, completion_ids=, **columns) -> list[float | None]."""
    timeout_s: float = 30.0
    """Seconds that one call may take; then its process is ended and its trajectories count as failed."""
    workers: int = 1
    """Reward processes per rollout."""
