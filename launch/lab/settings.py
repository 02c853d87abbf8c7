"""The settings `lab.*`, which only the lab reads: a recipe holds them as they are written."""

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct
from msgspec import inspect as kinds

from ...comm.errors import SettingError
from ...comm.recipe import ScheduleName
from ...comm.recipe.fields import AtLeastOne, Count, NotNegative, Positive
from ..config.help import setting_lines
from ..config.values import describe, show_value, typed_value


class LabSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`lab.*`: the devices of an emulated run; by default a 32B policy on H800s (sources: docs/develop/lab.md)."""

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
    batch_bound: Count | None = None
    """Most trajectories of one rollout after a move; null measures the device at the start, as a real one is measured."""
    stretch: Count = 32
    """Decode steps between two checks for messages; the device's own time is exact to one step."""
    prompt_tokens: Count = 300
    """Length of every prompt in tokens."""
    median_tokens: Count = 1600
    """Median length of a response in tokens. Lengths are log-normal, limited by `sampling.max_new_tokens`."""
    p99_over_median: AtLeastOne = 10.0
    """The 99th percentile of the lengths over their median, before the limit."""
    lengths: tuple[Count, ...] = ()
    """Measured lengths of responses, equally probable, instead of the log-normal ones."""
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
    """Size in KB of the buffer that is really sent instead of the weights."""


@cache
def lab_fields() -> dict[str, kinds.Field]:
    """All settings of the lab by name, without `lab.`."""
    return {entry.name: entry for entry in kinds.type_info(LabSettings).fields}  # pyright: ignore


def lab_of(given: Mapping[str, Any]) -> LabSettings:
    """The settings `lab.*` of a recipe; raises `SettingError` for one that is unknown or not allowed."""
    known = lab_fields()
    typed: dict[str, object] = {}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"the nearest is 'lab.{near[0]}'" if near else "headrace plan --help lists all"
            raise SettingError(f"unknown setting 'lab.{name}'; {hint}")
        typed[name] = typed_value(known[name].type, value)
        try:
            msgspec.convert({name: typed[name]}, LabSettings, strict=False)
        except msgspec.ValidationError as error:
            allowed = describe(known[name].type)
            raise SettingError(f"lab.{name}={show_value(value)} is not allowed; it takes {allowed}") from error
    return msgspec.convert(typed, LabSettings, strict=False)


def check_lab(given: Mapping[str, Any], schedule: ScheduleName) -> None:
    """The settings of an emulated recipe are known, and fit `run.schedule`."""
    if lab_of(given).colocated and schedule != "sync":
        raise SettingError("lab.colocated: only run.schedule=sync lets trainer and rollouts take turns")


def help_lines() -> Iterator[str]:
    """Every setting of the lab, with its default, type and meaning."""
    return setting_lines("lab", LabSettings)
