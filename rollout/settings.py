"""Settings of generation and rewards."""

from dataclasses import dataclass


@dataclass(slots=True)
class SamplingSettings:
    """`sampling.*`: how trajectories are drawn."""

    max_new_tokens: int = 256
    """Longest response in tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(slots=True)
class GeneratorSettings:
    """`generator.*`: the engine of one rollout."""

    max_running: int = 32
    """Trajectories decoded together."""


@dataclass(slots=True)
class RolloutSettings:
    """`rollout.*`: the cycle of one rollout."""

    batch_groups: int | None = None
    """Groups that a rollout takes on one version before it drains; null means no quota."""


@dataclass(slots=True)
class RewardSettings:
    """`reward.*`: the user's reward function."""

    path: str = ""
    """`FILE.py:FUNCTION`, called as f(prompts=, completions=, completion_ids=, **columns) -> list[float | None]."""
    timeout_s: float = 30.0
    """Seconds that one call may take; then its process is ended and its trajectories count as failed."""
    workers: int = 1
    """Reward processes per rollout."""
