"""`trainer`, `algorithm`, `optimizer` and `checkpoint`: the trainer's engine, its loss and its updates."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from .fields import Count, NotNegative, OptionalCount, Share, words


class TrainerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`trainer.*`: the trainer's engine."""

    engine: Annotated[str, words("builtin", "emulated")] = "builtin"
    """The trainer: the project's own, emulated devices, or your own adapter (docs/service.md)."""


class AlgorithmSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`algorithm.*`: advantages and loss; docs/algorithms.md has the settings of GRPO, DAPO, GSPO, RLOO and others."""

    advantage: Annotated[
        str, words("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", own="FILE.py:FUNCTION")
    ] = "grpo"
    """How rewards become advantages, or your own function of rewards and group sizes."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages of `grpo` by the rewards' standard deviation in the group or in the step; `none` is Dr. GRPO."""
    loss: Annotated[str, words("clip", "gspo", "cispo", "reinforce", own="FILE.py:FUNCTION")] = "clip"
    """Loss of a token: `clip` is the clipped surrogate of PPO, GRPO and DAPO; or your own function of `LossInputs`."""
    loss_agg: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """Mean of the loss: over tokens (DAPO), over responses (GRPO), or with constant length `sampling.max_new_tokens` (Dr. GRPO)."""
    clip_low: float = 0.2
    """Lower clip of the importance ratio: 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip of the importance ratio: 1 + clip_high."""
    clip_dual: Annotated[float, Meta(gt=1)] | None = None
    """Upper bound of the ratio for negative advantages (dual clip; 3 is usual); null is none."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    kl_coef: NotNegative = 0.0
    """Weight of a KL term against the initial policy, by the task `reference`; 0 for none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of the KL divergence from a token: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r, with r = p_ref / p."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL term to the loss of each token, or subtract it from the reward."""
    mask_truncated: bool = False
    """Leave responses that were cut at their longest length out of the loss."""
    overlong_buffer: OptionalCount = 0
    """Tokens before `sampling.max_new_tokens` over which a penalty for length grows (DAPO); 0 is off."""
    overlong_penalty: NotNegative = 1.0
    """Penalty at `sampling.max_new_tokens`, subtracted from the reward before the advantage."""


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
