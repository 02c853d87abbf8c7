"""`relay`, `comm` and `emulated`: links, deadlines, and the devices of an emulated run."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from .fields import MAX_SECONDS, AtLeastOne, Count, NotNegative, Positive


class RelaySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`relay.*`: the processes that hold weights and experience."""

    staging_device: str | None = None
    """GPU on a relay's host (not an actor's) for weights over NCCL; `cpu` is over Gloo; null is host memory."""


class EmulatedSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`emulated.*`: the devices of an emulated run; by default a 32B policy on H800s (sources: docs/schedules.md)."""

    gpus_per_rollout: Count = 4
    """GPUs of one rollout, which is a tensor-parallel replica."""
    train_gpus: Count = 32
    """GPUs of the trainer."""
    colocated: bool = False
    """Trainer and rollouts take turns on the same GPUs (with run.schedule=sync)."""
    step_ms: NotNegative = 0.0
    """Milliseconds of a decode step beside its other terms, for an engine whose steps have a cost of their own."""
    weights_ms: NotNegative = 9.9
    """Milliseconds of a decode step to read the weights, for all trajectories together."""
    request_us: NotNegative = 41.0
    """Microseconds of arithmetic per trajectory of a decode step; a step takes their sum or `weights_ms`, if longer."""
    kv_ns: NotNegative = 30.5
    """Nanoseconds of a decode step for each token in the KV cache."""
    prefill_us: NotNegative = 41.0
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
    p99_over_median: AtLeastOne = 10.0
    """The 99th percentile of the lengths over their median, before the limit."""
    lengths: tuple[Count, ...] = ()
    """Measured lengths of responses, equally probable, in place of the log-normal ones."""
    train_us: NotNegative = 820.0
    """Microseconds of one GPU to train one token of prompt or response."""
    update_s: NotNegative = 0.0
    """Seconds of the trainer for each optimizer update, beside those of its tokens."""
    micro_batch_s: NotNegative = 0.0
    """Seconds of the trainer for each micro-batch of `optimizer.micro_tokens`, beside those of its tokens."""
    weights_gb: NotNegative = 65.0
    """Size of one version of the weights in GB."""
    push_gb_s: Positive = 100.0
    """GB/s of a version from the trainer to a relay; the trainer waits for it."""
    chain_gb_s: Positive = 80.0
    """GB/s of a version down the chain of relays."""
    pull_gb_s: Positive = 25.0
    """GB/s of each GPU of a rollout that loads its share of a version from a relay's memory."""
    broadcast_gb_s: Positive = 54.0
    """GB/s of the broadcast from the trainer to all rollouts (all schedules but headrace)."""
    reshard_gb_s: Positive = 32.0
    """GB/s at which colocated devices convert the trainer's weights to the generator's layout."""
    buffer_kb: Count = 64
    """Size in KB of the buffer that is really sent in place of the weights."""


class CommSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`comm.*`: addresses, deadlines and links of the processes."""

    interface: str = "auto"
    """Where each host listens: an interface, an address, a network (`10.0.0.0/8`), or `auto`: by the route to the first host."""
    heartbeat_s: Annotated[float, Meta(ge=0.01, le=MAX_SECONDS)] = 0.3
    """Seconds between two heartbeats of a process."""
    expiry_s: Annotated[float, Meta(ge=0.1, le=MAX_SECONDS)] = 10.0
    """Seconds without a heartbeat after which a process counts as dead; the end of its connection counts at once."""
    deadline_s: Annotated[float, Meta(ge=0.1, le=MAX_SECONDS)] = 300.0
    """Longest blocking wait in seconds. A longer one ends the run with a message that names both sides."""
    tls: bool = False
    """Encrypt connections and messages between processes (extra `tls`); keys are made for each start of the run."""
    link: Literal["auto", "shm", "tcp", "nccl"] = "auto"
    """Transport of the weights; `auto` is shared memory on one host and tcp between hosts."""
    delta: bool = False
    """Send only the difference from the last version over links. This pays off on slow links."""
