"""Settings of the prompts and the experience queue."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class DataSettings:
    """`data.*`: the prompts."""

    path: str = ""
    """JSONL or parquet file, or a Hugging Face data set (id, or folder of `save_to_disk`), with a `prompt` column (text or
    chat messages); other columns go to the reward function."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    shuffle: bool = True
    """Draw a new order in each epoch, from `run.seed`."""
    too_long: str = "error"
    """What to do with a prompt that leaves no room for a response: `error` or `drop`."""


@dataclass(slots=True)
class BatchSettings:
    """`batch.*`: what one optimizer step trains on."""

    prompts_per_step: int = 16
    """Groups per optimizer step."""
    samples_per_prompt: int = 8
    """Trajectories per group."""


@dataclass(slots=True)
class TaskSettings:
    """One of `queue.tasks`: a function that adds columns to rows, before they are trained."""

    name: str = ""
    """Of the task, in the journal and in messages."""
    function: str = ""
    """FILE.py:FUNCTION, called with a dictionary of columns, each a list of one array for each row; it returns the same."""
    needs: list[str] = field(default_factory=list)
    """Columns that it is given."""
    yields: list[str] = field(default_factory=list)
    """Columns that it returns."""


@dataclass(slots=True)
class QueueSettings:
    """`queue.*`: how far generation may run ahead of training."""

    capacity: int | None = None
    """Groups that may be leased or ready at once; null means twice `batch.prompts_per_step`."""
    max_staleness: int | None = None
    """Bound on (version trained - version that generated); null means that only the capacity bounds it."""
    filter_zero_std: bool = False
    """Drop and replace groups whose rewards are all equal (dynamic sampling)."""
    on_stale: str = "wait"
    """What happens to a group that is due: `wait` holds its step back, `evict` throws it out and goes on. For `max_staleness`."""
    on_failed: str = "keep"
    """What happens to a group one of whose members failed: `keep` trains the others, `drop` throws them out."""
    sampler: str = ""
    """FILE.py:CLASS that chooses which of the complete groups is trained next, see `relay.samplers`; empty for the oldest."""
    tasks: list[TaskSettings] = field(default_factory=list)
    """Tasks of your own on every trajectory, each with `name`, `function`, `needs` and `yields`; served by `roles.task` ranks."""


@dataclass(slots=True)
class RepackSettings:
    """`repack.*`: long trajectories of a version are packed onto few rollouts, so that the others can go on to the next."""

    enabled: bool = True
    period_s: float = 5.0
    """Seconds between two plans; there is one right after each new version too."""
    batch_bound: int | None = None
    """Trajectories that a rollout may decode together before it counts as loaded; null measures it at the start: the batch
    at which a step takes 1.25 times as long as a small one."""
    transfer: str = "auto"
    """How a trajectory's cache gets there: `pages` (its keys and values travel), `prefill` (they are computed again), or
    `auto` (whichever has been measured to cost less)."""


@dataclass(slots=True)
class RelaySettings:
    """`relay.*`: the processes that hold weights and experience."""

    staging_device: str | None = None
    """GPU of a relay's host, by number and not an actor's, that takes weights in by NCCL broadcast; null for host memory. `cpu`
    does the same over Gloo."""
