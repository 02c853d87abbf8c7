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
    """Seconds without a heartbeat after which a process counts as dead."""
    deadline_s: float = 300.0
    """Seconds that a blocking wait may take before it ends the run with a message that names both sides."""
    link: str = "auto"
    """How weights travel: auto (shared memory on one host, tcp elsewhere), shm, tcp, gloo or nccl."""
    delta: bool = False
    """Send what changed since the last version instead of all of it, over links; worth it where they are slow."""
    chunk_bytes: int | None = None
    """Bytes in which weights go down the chain; null follows from the links' speed and the chain's length."""
    pace: float | None = None
    """Bytes per second that a link may send at most; null for no bound."""
