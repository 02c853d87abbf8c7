"""The recipe: every setting of a run, with its default, its bounds or choices, and its meaning.

`launch.config` reads and checks recipe files, and `--help` prints this list. A struct that is built in code is not checked.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from .messages.base import MAX_SAMPLES

Count = Annotated[int, Meta(ge=1)]
OptionalCount = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
ScheduleName = Literal["sync", "one_step", "stream", "partial", "headrace"]


def _words(*words: str) -> Meta:
    return Meta(pattern=f"^({'|'.join(words)})$|:", examples=[*words, "FILE.py:CLASS"])


class RunSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`run.*`: where the run lives and how long it is."""

    dir: str = "runs/run"
    """Run folder: metrics, journal, logs, checkpoints, summary."""
    seed: OptionalCount = 0
    """Seeds the data order, sampling and everything else that is random."""
    steps: Count = 100
    """Optimizer steps of the whole run."""
    schedule: ScheduleName = "headrace"
    """How generation, training and weights follow one another (docs/schedules.md)."""
    mode: Literal["train", "replay"] = "train"
    """`replay` trains a finished run in `run.dir` again from its saved rows and compares every step."""
    save_rows: bool = True
    """Keep what each step trained on under `rows/`, for `run.mode=replay`."""
    resume: Literal["never", "auto"] = "never"
    """`never` refuses a run folder with a journal; `auto` continues from its newest checkpoint if there is one."""


class RoleSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`roles.*`: how many ranks each role has; torchrun starts their sum."""

    actor: Count = 1
    """Ranks of the trainer."""
    relay: Count = 1
    """CPU processes that hold weights and experience; spread over the hosts first."""
    rollout: Count = 1
    """Ranks of the generator; `rollout.tp` of them make one replica."""
    reference: OptionalCount = 0
    """Ranks of the initial policy for a KL term, each with all of it; 0 lets the trainer's ranks do it."""
    task: OptionalCount = 0
    """CPU processes for `queue.tasks`."""


class ModelSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model.*`: the policy."""

    path: str = ""
    """Folder (or hub id) of a Hugging Face decoder-only checkpoint with its tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of generator and trainer."""


class DataSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`data.*`: the prompts."""

    path: str = ""
    """JSONL or parquet file, or Hugging Face data set, with a `prompt` column (text or chat messages); the reward gets the rest."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    shuffle: bool = True
    """Draw a new order in each epoch, from `run.seed`."""
    too_long: Literal["error", "drop"] = "error"
    """The fate of a prompt that leaves no room for a response: it ends the run, or is left out."""


class RewardSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`reward.*`: the user's reward function."""

    path: str = ""
    """`FILE.py:FUNCTION`, called as f(prompts=, completions=, completion_ids=, **columns) -> list[float | None]."""
    timeout_s: NotNegative = 30.0
    """Seconds that one call may take; then its process is ended and its trajectories count as failed."""
    workers: Count = 1
    """Reward processes per rollout."""


class BatchSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`batch.*`: what one optimizer step trains on."""

    prompts_per_step: Count = 16
    """Groups per optimizer step."""
    samples_per_prompt: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 8
    """Trajectories per group."""


class TaskSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `queue.tasks`: FILE.py:FUNCTION gets the columns that it `needs`, a list of one array for each row, and returns
    the columns that it `yields`, likewise."""

    name: str = ""
    function: str = ""
    needs: tuple[str, ...] = ()
    yields: tuple[str, ...] = ()


class QueueSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`queue.*`: how far generation may run ahead of training."""

    capacity: Count | None = None
    """Groups that may be leased or ready at once; null means twice `batch.prompts_per_step`."""
    max_staleness: OptionalCount | None = None
    """Bound on (version trained - version that generated); null means that only the capacity bounds it."""
    filter_zero_std: bool = False
    """Drop and replace groups whose rewards are all equal (dynamic sampling)."""
    on_stale: Literal["wait", "evict"] = "wait"
    """With `max_staleness`, a group that is due: `wait` holds its step back, `evict` throws it out."""
    on_failed: Literal["keep", "drop"] = "keep"
    """A group one of whose members failed: `keep` trains the others, `drop` throws them out."""
    sampler: str = ""
    """FILE.py:CLASS that chooses which of the complete groups is trained next, see `relay.samplers`; empty for the oldest."""
    tasks: tuple[TaskSettings, ...] = ()
    """Tasks of your own on every trajectory, each with `name`, `function`, `needs` and `yields`; served by `roles.task` ranks."""


class RepackSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`repack.*`: long trajectories of a version are packed onto few rollouts, so that the others can start the next."""

    enabled: bool = True
    """Whether trajectories move."""
    period_s: Annotated[float, Meta(ge=0.01)] = 5.0
    """Seconds between two plans; there is one right after each new version too."""
    batch_bound: Count | None = None
    """Trajectories of a loaded rollout; null measures the batch whose step takes 1.25 times as long as a small one's."""
    transfer: Literal["auto", "pages", "prefill"] = "auto"
    """A moved trajectory's cache: `pages` travel, `prefill` computes it again, `auto` takes the one measured to cost less."""


class SamplingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sampling.*`: how trajectories are drawn."""

    max_new_tokens: Count = 256
    """Longest response in tokens."""
    temperature: NotNegative = 1.0
    """Divides the logits; 0 takes the most probable token."""
    top_p: Share = 1.0
    """Draw from the most probable tokens that together have this probability (1 is off)."""
    top_k: OptionalCount = 0
    """Draw from this many most probable tokens (0 is off)."""
    min_p: Share = 0.0
    """Draw from tokens with at least this share of the highest probability (0 is off)."""
    repetition_penalty: Positive = 1.0
    """Divides the scores of tokens that prompt and response already have (1 is off)."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the policy's stop tokens."""


class GeneratorSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`generator.*`: the engine of one rollout."""

    max_running: Count = 32
    """Trajectories decoded together."""
    kv_gb: NotNegative | None = None
    """Memory of the KV cache; null is the rest of `gpu_share`, or on a CPU all of `max_running` in half of what is free."""
    gpu_share: Share = 0.85
    """Share of its GPU's memory that a rollout may fill."""
    prefill_tokens: Count = 2048
    """Most prompt tokens that one step prefills."""
    exact: bool = False
    """Log-probabilities of generator and trainer equal bit for bit (CPU; Llama, Qwen2, Qwen3, Mistral, Phi-3)."""
    attention: str = "auto"
    """Attention back-end of decoding: auto, or one by name (see docs/generator.md)."""


class RolloutSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`rollout.*`: the cycle of one rollout."""

    engine: Annotated[str, _words("builtin", "emulated", "transformers")] = "builtin"
    """The project's engine, a device that only takes its time, transformers', or an adapter of your own (docs/service.md)."""
    report_s: NotNegative = 1.0
    """Seconds between two reports of a rollout's load to the hub (emulated ones in an emulated run)."""
    batch_groups: Count | None = None
    """Groups between two looks for a newer version; null is a rollout's share of a step (`headrace`) or no end (`partial`)."""
    tp: Count = 1
    """Ranks of one replica of the generator, each with its part of every layer; `roles.rollout` is a multiple of it."""


class TrainerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`trainer.*`: the trainer's engine."""

    engine: Annotated[str, _words("builtin", "emulated")] = "builtin"
    """The project's actor, devices that only take their time, or an adapter of your own (docs/service.md)."""


class AlgorithmSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`algorithm.*`: the policy-gradient loss (GRPO)."""

    clip_low: float = 0.2
    """Lower clip of the importance ratio: 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip of the importance ratio: 1 + clip_high."""
    scale_by_std: bool = True
    """Divide the group's advantages by their standard deviation (GRPO); false is Dr. GRPO's form."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    kl_coef: NotNegative = 0.0
    """Weight of a KL term (k3) against the initial policy, whose log-probabilities are the task `reference`; 0 for none."""


class OptimizerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`optimizer.*`: AdamW."""

    lr: NotNegative = 1e-6
    """Peak learning rate."""
    warmup_steps: OptionalCount = 0
    """Steps of linear warm-up; constant afterwards."""
    beta1: Share = 0.9
    """Decay of the gradient's running mean."""
    beta2: Share = 0.95
    """Decay of the squared gradient's running mean."""
    eps: NotNegative = 1e-8
    """Added to the denominator of each update."""
    weight_decay: NotNegative = 0.0
    """Decoupled decay of the weights, times `lr`."""
    max_grad_norm: NotNegative = 1.0
    """Clip of the gradient's norm."""
    micro_tokens: Count = 8192
    """Token budget of one packed micro-batch."""


class CheckpointSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`checkpoint.*`: what is written under `checkpoints/`."""

    every: OptionalCount = 0
    """Optimizer steps between two checkpoints; 0 writes none but the export at the end."""
    keep: Count = 2
    """How many of the newest checkpoints stay on disk."""


class RelaySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`relay.*`: the processes that hold weights and experience."""

    staging_device: str | None = None
    """GPU of a relay's host, not an actor's, that receives weights by NCCL; `cpu`: over Gloo; null: into host memory."""


class EmulatedSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`emulated.*`: the devices of an emulated run; by default a 32B policy on H800s (docs/schedules.md says from where)."""

    speed: Annotated[float, Meta(ge=1e-3)] = 1.0
    """Emulated seconds per second; all times that a run reports are emulated ones."""
    gpus_per_rollout: Count = 4
    """GPUs of one rollout, a tensor-parallel replica."""
    train_gpus: Count = 32
    """GPUs of the trainer."""
    colocated: bool = False
    """Trainer and rollouts take turns on the same GPUs (with run.schedule=sync)."""
    weights_ms: NotNegative = 9.9
    """Milliseconds of a decode step for reading the weights, which all trajectories share."""
    request_us: NotNegative = 41.0
    """Microseconds of arithmetic per trajectory of a decode step; above `weights_ms` in all, it decides."""
    kv_ns: NotNegative = 30.5
    """Nanoseconds of a decode step per token in the KV cache."""
    prefill_us: NotNegative = 95.0
    """Microseconds per token that is prefilled."""
    kv_tokens: Count = 700_000
    """Tokens that the KV cache of a rollout holds."""
    kv_token_bytes: Count = 262_144
    """Bytes of one token's keys and values."""
    kv_gb_s: Positive = 50.0
    """GB/s at which keys and values move to another rollout."""
    stretch: Count = 32
    """Decode steps between two looks at the mail; the device's own time is exact to the step."""
    prompt_tokens: Count = 300
    """Tokens of every prompt."""
    median_tokens: Count = 1600
    """Median length of a response; lengths are log-normal, cut at sampling.max_new_tokens."""
    p99_over_median: Annotated[float, Meta(ge=1)] = 10.0
    """How many times the median the 99th percentile is (before the cut)."""
    train_us: NotNegative = 820.0
    """Microseconds of one GPU that training takes per token of prompt and response."""
    weights_gb: NotNegative = 65.0
    """Size of one version."""
    push_gb_s: Positive = 100.0
    """GB/s at which the trainer hands a version to a relay: its stall."""
    chain_gb_s: Positive = 80.0
    """GB/s at which a version goes down the chain of relays."""
    pull_gb_s: Positive = 25.0
    """GB/s at which each GPU of a rollout loads its share of a version from a relay's memory."""
    broadcast_gb_s: Positive = 8.25
    """GB/s of the broadcast from trainer to rollouts where all of them update together (sync, one_step, stream, partial)."""
    reshard_gb_s: Positive = 32.0
    """GB/s at which colocated devices turn the trainer's weights into the generator's."""
    buffer_kb: Count = 64
    """Size of the buffer that stands for the weights and really goes its way."""


class CommSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`comm.*`: how processes find and watch each other."""

    interface: str = "127.0.0.1"
    """The one address that stores and links of this run listen on."""
    heartbeat_s: Annotated[float, Meta(ge=0.01)] = 0.3
    """Seconds between two heartbeats of a process."""
    expiry_s: Annotated[float, Meta(ge=0.1)] = 10.0
    """Seconds without a heartbeat after which a process counts as dead, unless the end of its connection told before."""
    deadline_s: Annotated[float, Meta(ge=0.1)] = 300.0
    """Seconds that a blocking wait may take before it ends the run with a message that names both sides."""
    link: Literal["auto", "shm", "tcp", "nccl"] = "auto"
    """How weights travel; `auto` is shared memory on one host, tcp elsewhere."""
    delta: bool = False
    """Send what changed since the last version instead of all of it, over links; worth it where they are slow."""
    chunk_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 25)] | None = None
    """Bytes in which weights go down the chain; null follows from the links' speed and the chain's length."""
    max_bytes_per_s: Positive | None = None
    """Most bytes per second of one link; null for no bound."""


class Recipe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of a run, by section."""

    run: RunSettings = RunSettings()
    roles: RoleSettings = RoleSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    reward: RewardSettings = RewardSettings()
    batch: BatchSettings = BatchSettings()
    queue: QueueSettings = QueueSettings()
    repack: RepackSettings = RepackSettings()
    sampling: SamplingSettings = SamplingSettings()
    generator: GeneratorSettings = GeneratorSettings()
    rollout: RolloutSettings = RolloutSettings()
    trainer: TrainerSettings = TrainerSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    relay: RelaySettings = RelaySettings()
    emulated: EmulatedSettings = EmulatedSettings()
    comm: CommSettings = CommSettings()

    @property
    def num_replicas(self) -> int:
        """Replicas of the generator."""
        return self.roles.rollout // self.rollout.tp
