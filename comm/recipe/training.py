"""`trainer`, `algorithm`, `optimizer` and `checkpoint`: the trainer's engine, its loss and its updates."""

from typing import Annotated, Literal

from msgspec import Struct

from .fields import Count, NotNegative, OptionalCount, Share, words


class TrainerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`trainer.*`: the trainer's engine."""

    engine: Annotated[str, words("builtin", "emulated")] = "builtin"
    """The trainer: the project's own, emulated devices, or your own adapter (docs/service.md)."""


class AlgorithmSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`algorithm.*`: the policy-gradient loss (GRPO)."""

    clip_low: float = 0.2
    """Lower clip of the importance ratio: 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip of the importance ratio: 1 + clip_high."""
    scale_by_std: bool = True
    """Divide advantages by the standard deviation of the group's rewards (GRPO); false is Dr. GRPO."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    kl_coef: NotNegative = 0.0
    """Weight of a KL term (k3) against the initial policy, by the task `reference`; 0 for none."""


class OptimizerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`optimizer.*`: AdamW."""

    name: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit` keeps its moments in 8 bits, by torchao."""
    lr: NotNegative = 1e-6
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine", "polynomial", "inverse_sqrt"] = "constant"
    """Learning rate after the warm-up, over `run.steps`; as `transformers.get_scheduler`."""
    min_lr_ratio: Share = 0.0
    """Share of `lr` at the end of the schedule `cosine`."""
    warmup_steps: OptionalCount = 0
    """Steps of linear warm-up."""
    beta1: Share = 0.9
    """Decay of the running mean of the gradient."""
    beta2: Share = 0.95
    """Decay of the running mean of the squared gradient."""
    eps: NotNegative = 1e-8
    """Added to the denominator of an update."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, times `lr`; none for norms and biases."""
    max_grad_norm: NotNegative = 1.0
    """Largest norm of the gradient; a longer one is scaled down (0 is off)."""
    micro_tokens: Count = 8192
    """Token budget of one packed micro-batch."""


class CheckpointSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`checkpoint.*`: the checkpoints under `checkpoints/`."""

    every: OptionalCount = 0
    """Optimizer steps between two checkpoints; with 0 only the export at the end is written."""
    keep: Count = 2
    """Number of the newest checkpoints that stay on disk."""
