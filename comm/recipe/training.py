"""`trainer`, `lora`, `algorithm`, `optimizer` and `checkpoint`: the trainer's engine, its loss and its updates."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from .fields import (
    Bound,
    Cap,
    Count,
    Finite,
    NotNegative,
    OptionalCount,
    Positive,
    SecondsOrNone,
    Share,
    ShareBelowOne,
    words,
)


class TrainerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`trainer.*`: the trainer's engine."""

    engine: Annotated[str, words("builtin", "emulated")] = "builtin"
    """The trainer: the project's own, emulated devices, or your own adapter (docs/use/service.md)."""
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Keep only the layers' inputs for the backward pass and recompute the rest; `auto` does so if a GPU would be too small otherwise."""
    offload: bool = False
    """Keep weights, gradients and moments in host memory, and update them there; for GPUs."""
    shard_ranks: Count | None = None
    """Ranks that share one copy of the weights (HSDP); `roles.actor` is a multiple of it, null shards over all (FSDP)."""
    prefix_tree: bool = True
    """Compute tokens that rows of a micro-batch share from their first one on, such as a group's prompt, once for all of them."""
    compile: bool = False
    """Compile the layers by torch.compile, so the first step takes longer; for small policies on GPUs. Needs a C++ compiler, and Triton on a GPU."""
    threads: Count | None = None
    """Threads of each rank of the trainer and of the reference; null chooses by the host's cores and the other processes there."""


class LoraSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`lora.*`: a low-rank adapter that is trained instead of the weights, with peft's names (docs/use/lora.md)."""

    rank: OptionalCount = 0
    """Rank of the adapter's matrices; 0 trains the weights themselves."""
    alpha: Positive = 16
    """Scale of the adapter: its product is multiplied by alpha / rank."""
    targets: str | Annotated[tuple[str, ...], Meta(min_length=1)] = "all-linear"
    """Linear layers with an adapter, such as [q_proj, v_proj]; `all-linear` takes all but the LM head."""
    path: str = ""
    """Folder of an adapter in peft's format from which training continues, with the same rank, alpha and targets; empty starts a new one."""


class AlgorithmSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`algorithm.*`: advantages and loss; docs/use/algorithms.md has the settings of GRPO, DAPO, GSPO, RLOO and others."""

    advantage: Annotated[
        str, words("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", own="FILE.py:FUNCTION")
    ] = "grpo"
    """How rewards become advantages, or your own function of rewards and group sizes."""
    gamma: Share = 1.0
    """Discount factor of later rewards, for `gae`."""
    lam: Share = 1.0
    """Lambda of GAE: 1 uses the whole return, 0 one step."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages of `grpo` by the rewards' standard deviation in the group or in the step; `none` is Dr. GRPO."""
    loss: Annotated[str, words("clip", "gspo", "cispo", "reinforce", own="FILE.py:FUNCTION")] = "clip"
    """Loss of a token: `clip` is the clipped surrogate of PPO, GRPO and DAPO; or your own function of `LossInputs`."""
    loss_agg: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """Mean of the loss: over tokens (DAPO), over responses (GRPO), or with constant length `sampling.max_new_tokens` (Dr. GRPO)."""
    clip_low: Bound = 0.2
    """Lower clip of the importance ratio: 1 - clip_low."""
    clip_high: Bound = 0.2
    """Upper clip of the importance ratio: 1 + clip_high."""
    clip_dual: Annotated[float, Meta(gt=1)] | None = None
    """Upper bound of the ratio for negative advantages (dual clip; 3 is usual); null sets none."""
    proximal: Literal["version", "rollout"] = "version"
    """Policy with which the clip compares: that at the start of the step (decoupled), or the generator's."""
    importance_sampling: Literal["token_dppo", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "token_dppo"
    )
    """Bounds of importance weights: truncate inside of DPPO's trust region, truncate alone (TIS), or mask (IcePop), of each token or of whole responses."""
    importance_sampling_cap: Cap = 2.0
    """Largest importance weight; a mask also drops weights below 1 / cap."""
    entropy_coef: Finite = 0.0
    """Weight of an entropy bonus."""
    kl_coef: NotNegative = 0.0
    """Weight of a KL term against the initial policy, by the task `reference`; 0 for none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of the KL divergence from a token: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r, with r = p_ref / p."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL term to the loss of each token, or subtract it from the reward."""
    mask_truncated: bool = False
    """Leave responses that were cut at the maximum length out of the loss."""
    overlong_buffer: OptionalCount = 0
    """Tokens before `sampling.max_new_tokens` over which a penalty for length grows (DAPO); 0 is off."""
    overlong_penalty: NotNegative = 1.0
    """Penalty at `sampling.max_new_tokens`, subtracted from the reward before the advantage."""
    router_aux_coef: NotNegative = 0.0
    """Weight of the load-balancing loss of the routers of a mixture of experts; 0 for none."""

    @property
    def is_of_group(self) -> bool:
        """Whether advantages are against the other samples of the prompt, so that a group of equal rewards teaches nothing."""
        return self.advantage in ("grpo", "rloo", "reinforce_plus_plus_baseline")


class OptimizerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`optimizer.*`: AdamW."""

    name: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit` keeps its moments in 8 bits, by torchao."""
    lr: NotNegative = 1e-6
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine", "polynomial", "inverse_sqrt"] = "constant"
    """Learning rate after the warm-up, over `run.steps`; as `transformers.get_scheduler`."""
    min_lr_ratio: Share = 0.0
    """Final learning rate of the schedule `cosine`, as a share of `lr`."""
    warmup_steps: OptionalCount = 0
    """Steps of linear warm-up."""
    beta1: ShareBelowOne = 0.9
    """Decay of the running mean of the gradient."""
    beta2: ShareBelowOne = 0.95
    """Decay of the running mean of the squared gradient."""
    eps: NotNegative = 1e-8
    """Added to the denominator of an update."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, times `lr`; none for norms and biases."""
    max_grad_norm: Bound = 1.0
    """Largest norm of the gradient; a larger gradient is scaled down (0 is off)."""
    micro_tokens: Count | None = None
    """Token budget of one packed micro-batch; null is 8192 on GPUs, and 2048 on a host without one, where more costs memory and gains little time."""

    @property
    def micro_batch(self) -> int:
        """`micro_tokens`, or the default of GPUs; the start of a run has set it for hosts without one."""
        return self.micro_tokens or 8192


class CriticSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`critic.*`: the critic of PPO, with algorithm.advantage=gae; its other settings are those of `optimizer`."""

    lr: NotNegative = 1e-5
    """Peak learning rate."""
    clip_value: Bound = 0.5
    """Largest difference from the value before the step that the loss uses; 0 is off."""
    warmup_steps: OptionalCount = 0
    """First steps that update the critic alone; the policy stays as it is (verl's `critic_warmup`)."""


class CheckpointSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`checkpoint.*`: the checkpoints under `checkpoints/`."""

    every: OptionalCount | None = None
    """Optimizer steps between two checkpoints; null writes one every 30 minutes, and every `eval.every` steps too where `best` is a metric of evaluations; 0 writes none. One is always written at the end of a run and after a signal."""
    keep: Count = 2
    """Number of the newest checkpoints that stay on disk."""
    best: str = ""
    """A metric such as `reward/mean` or `eval/NAME/avg@1`: the checkpoint with its highest value stays on disk too; empty is off."""
    grace_s: SecondsOrNone = 60.0
    """Seconds that an interrupted run has to write its last checkpoint, in addition to the usual 20."""

    @property
    def is_best_evaluated(self) -> bool:
        """Whether `best` is a metric of evaluations, whose scores come after the checkpoint."""
        return self.best.startswith("eval/")
