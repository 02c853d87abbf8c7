"""What all processes of a run agree on: the run, the policy's files, and how they talk."""

from dataclasses import dataclass

SEGMENT_FD = "HEADRACE_SEGMENT_FD"
"""Names a relay's shared memory in its environment; others on the host open it as /proc/<seat pid>/fd/<number>."""

LARGE_COPIES = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000"}
"""Environment in which the C library copies large pieces past the caches, twice as fast; it is read at a process's start."""


@dataclass(slots=True)
class RunSettings:
    """`run.*`: where the run lives and how long it is."""

    dir: str = "runs/run"
    """Run folder: metrics, journal, logs, checkpoints, summary."""
    seed: int = 0
    """Seeds the data order, sampling and everything else that is random."""
    steps: int = 100
    """Optimizer steps of the whole run."""
    schedule: str = "headrace"
    """How generation, training and weights follow one another: sync, one_step, stream, partial or headrace."""
    mode: str = "train"
    """`train`, or `replay`: train a finished run in `run.dir` again from its saved rows and compare every step."""
    save_rows: bool = True
    """Keep what each step trained on under `rows/`, for `run.mode=replay`."""
    resume: str = "never"
    """`never` (a run folder with a journal is refused), or `auto` (go on from the newest checkpoint if there is one)."""


@dataclass(slots=True)
class ModelSettings:
    """`model.*`: the policy."""

    path: str = ""
    """Folder (or hub id) of a Hugging Face decoder-only checkpoint with its tokenizer."""
    dtype: str = "float32"
    """Compute type of generator and trainer: float32 or bfloat16."""


@dataclass(slots=True)
class CommSettings:
    """`comm.*`: how processes find and watch each other."""

    interface: str = "127.0.0.1"
    """The one address that stores and links of this run listen on."""
    heartbeat_s: float = 0.3
    """Seconds between two heartbeats of a process."""
    expiry_s: float = 10.0
    """Seconds without a heartbeat after which a process counts as dead, unless the end of its connection told before."""
    deadline_s: float = 300.0
    """Seconds that a blocking wait may take before it ends the run with a message that names both sides."""
    link: str = "auto"
    """How weights travel: auto (shared memory on one host, tcp elsewhere), shm, tcp or nccl."""
    delta: bool = False
    """Send what changed since the last version instead of all of it, over links; worth it where they are slow."""
    chunk_bytes: int | None = None
    """Bytes in which weights go down the chain; null follows from the links' speed and the chain's length."""
    pace: float | None = None
    """Bytes per second that a link may send at most; null for no bound."""


@dataclass(slots=True)
class EmulatedSettings:
    """`emulated.*`: the devices of an emulated run; by default a 32B policy on H800s (docs/schedules.md says from where)."""

    speed: float = 1.0
    """Emulated seconds per second; all times that a run reports are emulated ones."""
    gpus_per_rollout: int = 4
    """GPUs of one rollout, a tensor-parallel replica."""
    train_gpus: int = 32
    """GPUs of the trainer."""
    colocated: bool = False
    """Trainer and rollouts take turns on the same GPUs (with run.schedule=sync)."""
    weights_ms: float = 9.9
    """Milliseconds of a decode step for reading the weights, which all trajectories share."""
    request_us: float = 41.0
    """Microseconds of arithmetic per trajectory of a decode step; above `weights_ms` in all, it decides."""
    kv_ns: float = 30.5
    """Nanoseconds of a decode step per token in the KV cache."""
    prefill_us: float = 95.0
    """Microseconds per token that is prefilled."""
    kv_tokens: int = 700_000
    """Tokens that the KV cache of a rollout holds."""
    kv_token_bytes: int = 262_144
    """Bytes of one token's keys and values."""
    kv_gb_s: float = 50.0
    """GB/s at which keys and values move to another rollout."""
    stretch: int = 32
    """Decode steps between two looks at the mail; the device's own time is exact to the step."""
    prompt_tokens: int = 300
    """Tokens of every prompt."""
    median_tokens: int = 1600
    """Median length of a response; lengths are log-normal, cut at sampling.max_new_tokens."""
    p99_over_median: float = 10.0
    """How many times the median the 99th percentile is (before the cut)."""
    train_us: float = 820.0
    """Microseconds of one GPU that training takes per token of prompt and response."""
    weights_gb: float = 65.0
    """Size of one version."""
    push_gb_s: float = 100.0
    """GB/s at which the trainer hands a version to a relay: its stall."""
    chain_gb_s: float = 80.0
    """GB/s at which a version goes down the chain of relays."""
    pull_gb_s: float = 25.0
    """GB/s at which each GPU of a rollout loads its share of a version from a relay's memory."""
    broadcast_gb_s: float = 8.25
    """GB/s of the broadcast from trainer to rollouts where all of them update together (sync, one_step, stream, partial)."""
    reshard_gb_s: float = 32.0
    """GB/s at which colocated devices turn the trainer's weights into the generator's."""
    buffer_kb: int = 64
    """Size of the buffer that stands for the weights and really goes its way."""
