"""Settings of training: the loss, the optimizer, the checkpoints."""

from dataclasses import dataclass


@dataclass(slots=True)
class TrainerSettings:
    """`trainer.*`: the trainer's engine."""

    engine: str = "builtin"
    """What trains: `builtin`, the project's actor; `emulated`, devices that only take their time; or an adapter of your own,
    `FILE.py:CLASS` (see docs/service.md)."""


@dataclass(slots=True)
class AlgorithmSettings:
    """`algorithm.*`: the policy-gradient loss (GRPO)."""

    clip_low: float = 0.2
    """Lower clip of the importance ratio: 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip of the importance ratio: 1 + clip_high."""
    scale_by_std: bool = True
    """Divide the group's advantages by their standard deviation (GRPO); false is Dr. GRPO's form."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    kl_coef: float = 0.0
    """Weight of a KL term (k3) against the initial policy, whose log-probabilities are the task `reference`; 0 for none."""


@dataclass(slots=True)
class OptimizerSettings:
    """`optimizer.*`: AdamW."""

    lr: float = 1e-6
    """Peak learning rate."""
    warmup_steps: int = 0
    """Steps of linear warm-up; constant afterwards."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Clip of the gradient's norm."""
    micro_tokens: int = 8192
    """Token budget of one packed micro-batch."""


@dataclass(slots=True)
class CheckpointSettings:
    """`checkpoint.*`: what is written under `checkpoints/`."""

    every: int = 0
    """Optimizer steps between two checkpoints; 0 writes none but the export at the end."""
    keep: int = 2
    """How many of the newest checkpoints stay on disk."""
