"""The recipe: every setting of a run, with its default, its bounds or choices, and its meaning.

`launch.config` reads and checks recipe files, and `--help` prints this list. Settings that are built in code are not checked.
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
    """`run.*`: folder, length and schedule of the run."""

    dir: str = "runs/run"
    """Run folder: metrics, journal, logs, checkpoints, summary."""
    seed: OptionalCount = 0
    """Seed of the data order, of sampling and of every other random choice."""
    steps: Count = 100
    """Optimizer steps of the run."""
    schedule: ScheduleName = "headrace"
    """The order of generation, training and weight updates (docs/schedules.md)."""
    mode: Literal["train", "replay"] = "train"
    """`replay` repeats the training of the finished run in `run.dir` from its saved rows, and compares every step."""
    save_rows: bool = True
    """Save the rows of each step under `rows/`, for `run.mode=replay`."""
    resume: Literal["never", "auto"] = "never"
    """`never` refuses a run folder with a journal; `auto` continues from its newest checkpoint if there is one."""


class RoleSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`roles.*`: the number of ranks of each role; torchrun starts their sum."""

    actor: Count = 1
    """Ranks of the trainer."""
    relay: Count = 1
    """CPU processes that hold weights and experience; each host gets one before any host gets two."""
    rollout: Count = 1
    """Ranks of the generator; `rollout.tp` of them make one replica."""
    reference: OptionalCount = 0
    """Ranks that compute the initial policy for a KL term, each with a whole copy; with 0 the trainer's ranks compute it."""
    task: OptionalCount = 0
    """CPU processes for `queue.tasks`."""


class ModelSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model.*`: the policy."""

    path: str = ""
    """Folder or Hugging Face Hub id of a decoder-only checkpoint with its tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of generator and trainer."""


class DataSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`data.*`: the prompts."""

    path: str = ""
    """JSONL or parquet file, or Hugging Face data set, with prompts (text or chat messages) in the column `prompt`."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    shuffle: bool = True
    """Shuffle the prompts in each epoch, by `run.seed`."""
    too_long: Literal["error", "drop"] = "error"
    """For a prompt that leaves no room for a response: `error` ends the run, `drop` skips the prompt."""


class RewardSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`reward.*`: the user's reward function."""

    path: str = ""
    """`FILE.py:FUNCTION`, called as f(prompts=, completions=, completion_ids=, **columns) -> list[float | None]."""
    timeout_s: NotNegative = 30.0
    """Longest time of one call in seconds; then its process is killed, and its trajectories count as failed."""
    workers: Count = 1
    """Reward processes per rollout."""


class BatchSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`batch.*`: the data of one optimizer step."""

    prompts_per_step: Count = 16
    """Groups per optimizer step."""
    samples_per_prompt: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 8
    """Trajectories per group."""


class TaskSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `queue.tasks`.

    FILE.py:FUNCTION gets the columns `needs` and returns the columns `yields`; a column is a list of one array for each row.
    """

    name: str = ""
    function: str = ""
    needs: tuple[str, ...] = ()
    yields: tuple[str, ...] = ()


class QueueSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`queue.*`: how far generation may run ahead of training."""

    capacity: Count | None = None
    """Most groups leased or ready at one time; null means those of two steps, or of S + 1 under a bound S on staleness."""
    max_staleness: OptionalCount | None = None
    """Upper bound of (version in training - version that generated); with null only the capacity bounds it."""
    filter_zero_std: bool = False
    """Drop and replace groups whose rewards are all equal (dynamic sampling)."""
    on_stale: Literal["wait", "evict"] = "wait"
    """For groups at the bound of `max_staleness`: `wait` delays the step for them, `evict` discards those beyond it."""
    on_failed: Literal["keep", "drop"] = "keep"
    """For a group with a failed trajectory: `keep` trains its other trajectories, `drop` discards them."""
    sampler: str = ""
    """FILE.py:CLASS that chooses the next groups to train (see relay/queue/samplers.py); empty takes the oldest."""
    tasks: tuple[TaskSettings, ...] = ()
    """Your own tasks for every trajectory, with `name`, `function`, `needs` and `yields`; the `roles.task` ranks run them."""


class RepackSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`repack.*`: moving the last trajectories of a version to few rollouts, so that the others can start the next."""

    enabled: bool = True
    """Whether trajectories are moved."""
    period_s: Annotated[float, Meta(ge=0.01)] = 5.0
    """Seconds between two plans; a new version also causes one."""
    batch_bound: Count | None = None
    """Most trajectories of one rollout after a move; null measures where a step takes 1.25 times a small batch's time."""
    transfer: Literal["auto", "pages", "prefill"] = "auto"
    """KV cache of a moved trajectory: `pages` sends it, `prefill` computes it again, `auto` measures which is cheaper."""


class SamplingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sampling.*`: how tokens are drawn."""

    max_new_tokens: Count = 256
    """Longest response in tokens."""
    temperature: NotNegative = 1.0
    """Divisor of the logits; 0 takes the most probable token."""
    top_p: Share = 1.0
    """Draw from the most probable tokens whose probabilities sum to this (1 is off)."""
    top_k: OptionalCount = 0
    """Draw from this many most probable tokens (0 is off)."""
    min_p: Share = 0.0
    """Draw from tokens with at least this fraction of the highest probability (0 is off)."""
    repetition_penalty: Positive = 1.0
    """Lowers the scores of tokens that already occur in prompt or response by this factor (1 is off)."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the policy's stop tokens."""


class GeneratorSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`generator.*`: the engine of one rollout."""

    max_running: Count = 32
    """Trajectories that are decoded together."""
    kv_gb: NotNegative | None = None
    """GB of the KV cache; null is the rest of `gpu_share`; on a CPU the need of `max_running`, at most half of free memory."""
    gpu_share: Share = 0.85
    """Fraction of its GPU's memory that a rollout may use."""
    prefill_tokens: Count = 2048
    """Most prompt tokens that are prefilled in one step."""
    exact: bool = False
    """Make the log-probabilities of generator and trainer equal bit for bit (CPU; Llama, Qwen2, Qwen3, Mistral, Phi-3)."""
    attention: str = "auto"
    """Attention backend of decoding: `auto`, or the name of one (docs/generator.md)."""


class RolloutSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`rollout.*`: the cycle of one rollout."""

    engine: Annotated[str, _words("builtin", "emulated", "transformers")] = "builtin"
    """The generator: the project's own, an emulated device, transformers', or your own adapter (docs/service.md)."""
    report_s: NotNegative = 1.0
    """Seconds between two load reports of a rollout to the hub (emulated seconds in an emulated run)."""
    batch_groups: Count | None = None
    """Groups between two checks for a newer version; null is a rollout's share of a step, for `partial` no limit."""
    tp: Count = 1
    """Tensor-parallel ranks of one replica of the generator; `roles.rollout` is a multiple of it."""


class TrainerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`trainer.*`: the trainer's engine."""

    engine: Annotated[str, _words("builtin", "emulated")] = "builtin"
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

    lr: NotNegative = 1e-6
    """Peak learning rate."""
    warmup_steps: OptionalCount = 0
    """Steps of linear warm-up; constant afterwards."""
    beta1: Share = 0.9
    """Decay of the running mean of the gradient."""
    beta2: Share = 0.95
    """Decay of the running mean of the squared gradient."""
    eps: NotNegative = 1e-8
    """Added to the denominator of an update."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, times `lr`."""
    max_grad_norm: NotNegative = 1.0
    """Largest norm of the gradient; a longer one is scaled down."""
    micro_tokens: Count = 8192
    """Token budget of one packed micro-batch."""


class CheckpointSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`checkpoint.*`: the checkpoints under `checkpoints/`."""

    every: OptionalCount = 0
    """Optimizer steps between two checkpoints; with 0 only the export at the end is written."""
    keep: Count = 2
    """Number of the newest checkpoints that stay on disk."""


class RelaySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`relay.*`: the processes that hold weights and experience."""

    staging_device: str | None = None
    """GPU on a relay's host (not an actor's) for weights over NCCL; `cpu` is over Gloo; null is host memory."""


class EmulatedSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`emulated.*`: the devices of an emulated run; by default a 32B policy on H800s (sources: docs/schedules.md)."""

    speed: Annotated[float, Meta(ge=1e-3)] = 1.0
    """Emulated seconds per second; every time that a run reports is emulated."""
    gpus_per_rollout: Count = 4
    """GPUs of one rollout, which is a tensor-parallel replica."""
    train_gpus: Count = 32
    """GPUs of the trainer."""
    colocated: bool = False
    """Trainer and rollouts take turns on the same GPUs (with run.schedule=sync)."""
    weights_ms: NotNegative = 9.9
    """Milliseconds of a decode step to read the weights, for all trajectories together."""
    request_us: NotNegative = 41.0
    """Microseconds of arithmetic per trajectory of a decode step; a step takes their sum or `weights_ms`, if longer."""
    kv_ns: NotNegative = 30.5
    """Nanoseconds of a decode step for each token in the KV cache."""
    prefill_us: NotNegative = 95.0
    """Microseconds for each prefilled token."""
    kv_tokens: Count = 700_000
    """Capacity of a rollout's KV cache in tokens."""
    kv_token_bytes: Count = 262_144
    """Bytes of one token's keys and values."""
    kv_gb_s: Positive = 50.0
    """GB/s of a KV cache that is sent to another rollout."""
    stretch: Count = 32
    """Decode steps between two checks for messages; the device's own time is exact to one step."""
    prompt_tokens: Count = 300
    """Length of every prompt in tokens."""
    median_tokens: Count = 1600
    """Median length of a response in tokens. Lengths are log-normal, limited by `sampling.max_new_tokens`."""
    p99_over_median: Annotated[float, Meta(ge=1)] = 10.0
    """The 99th percentile of the lengths over their median, before the limit."""
    train_us: NotNegative = 820.0
    """Microseconds of one GPU to train one token of prompt or response."""
    weights_gb: NotNegative = 65.0
    """Size of one version of the weights in GB."""
    push_gb_s: Positive = 100.0
    """GB/s of a version from the trainer to a relay; the trainer waits for it."""
    chain_gb_s: Positive = 80.0
    """GB/s of a version down the chain of relays."""
    pull_gb_s: Positive = 25.0
    """GB/s of each GPU of a rollout that loads its share of a version from a relay's memory."""
    broadcast_gb_s: Positive = 8.25
    """GB/s of the broadcast from the trainer to all rollouts (schedules sync, one_step, stream and partial)."""
    reshard_gb_s: Positive = 32.0
    """GB/s at which colocated devices convert the trainer's weights to the generator's layout."""
    buffer_kb: Count = 64
    """Size in KB of the buffer that is really sent in place of the weights."""


class CommSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`comm.*`: addresses, deadlines and links of the processes."""

    interface: str = "127.0.0.1"
    """The address on which the stores and links of the run listen."""
    heartbeat_s: Annotated[float, Meta(ge=0.01)] = 0.3
    """Seconds between two heartbeats of a process."""
    expiry_s: Annotated[float, Meta(ge=0.1)] = 10.0
    """Seconds without a heartbeat after which a process counts as dead; the end of its connection counts at once."""
    deadline_s: Annotated[float, Meta(ge=0.1)] = 300.0
    """Longest blocking wait in seconds. A longer one ends the run with a message that names both sides."""
    link: Literal["auto", "shm", "tcp", "nccl"] = "auto"
    """Transport of the weights; `auto` is shared memory on one host and tcp between hosts."""
    delta: bool = False
    """Send only the difference from the last version over links. This pays off on slow links."""
    chunk_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 25)] | None = None
    """Size of a chunk of weights in the chain of relays; null computes it from the links' speed and the chain's length."""
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
