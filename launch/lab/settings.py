"""The settings `lab.*`, which only the lab reads: a recipe holds them as they are written."""

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, get_type_hints

import msgspec
from msgspec import Struct, structs
from msgspec import inspect as kinds

from ...comm.errors import SettingError
from ...comm.recipe import ScheduleName
from ...comm.recipe.fields import AtLeastOne, Count, NotNegative, Positive
from ..config.help import setting_lines
from ..config.values import describe, show_value, typed_value
from .profiles import constants


class LabSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`lab.*`: the devices of an emulated run; a setting without a value has that of `lab.profile` (sources: docs/develop/lab.md)."""

    profile: Literal["program", "papers", "measured"] = "program"
    """Constants of the devices: what this program reaches, what the papers describe, or none, as a plan gives those that it measured."""
    model: Literal["7b", "32b", "72b"] = "32b"
    """Policy for which the profile computes its constants."""
    gpus_per_rollout: Count
    """GPUs of one rollout, which is a tensor-parallel replica."""
    train_gpus: Count = 32
    """GPUs of the trainer."""
    colocated: bool = False
    """Trainer and rollouts take turns on the same GPUs (with run.schedule=sync)."""
    step_ms: NotNegative = 0.0
    """Milliseconds of a decode step beside its other terms, for an engine whose steps have a cost of their own."""
    host_ms: NotNegative
    """Least milliseconds of a decode step beside `step_ms`: those of the host, which launches its kernels one by one."""
    weights_ms: NotNegative
    """Milliseconds of a decode step to read the weights, for all trajectories together."""
    request_us: NotNegative
    """Microseconds of arithmetic per trajectory of a decode step; a step takes their sum or `weights_ms`, if longer."""
    kv_ns: NotNegative
    """Nanoseconds of a decode step for each token in the KV cache."""
    prefill_us: NotNegative
    """Microseconds for each prefilled token."""
    kv_tokens: Count
    """Capacity of a rollout's KV cache in tokens."""
    kv_token_bytes: Count
    """Bytes of one token's keys and values."""
    kv_gb_s: Positive | None
    """GB/s of a KV cache that is sent to another rollout; null sends none, so that rollout computes it again."""
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
    turns: Count = 1
    """Equal turns of a response; after each but the last one it waits for a tool, with its cache, and decodes nothing."""
    tool_s: NotNegative = 0.0
    """Median seconds of a tool's answer, log-normal with a 99th percentile of 10 times that."""
    train_us: NotNegative
    """Microseconds of one GPU to train one token of prompt or response."""
    trainer_ranks: Count
    """Ranks of the trainer, each with whole rows of a micro-batch and waiting for the one with most tokens; 1 shares them evenly."""
    collectives_s: NotNegative
    """Least seconds of a micro-batch: those of its collectives, beside which the GPUs train its tokens."""
    update_s: NotNegative
    """Seconds of the trainer for each optimizer update, beside those of its tokens."""
    micro_batch_s: NotNegative = 0.0
    """Seconds of the trainer for each micro-batch of `optimizer.micro_tokens`, beside those of its tokens."""
    weights_gb: NotNegative
    """Size of one version of the weights in GB."""
    push_gb_s: Positive
    """GB/s of a version from the trainer to a relay; the trainer waits for it."""
    chain_gb_s: Positive
    """GB/s of a version down the chain of relays."""
    pull_gb_s: Positive
    """GB/s of each GPU of a rollout that loads its share of a version from a relay's memory."""
    broadcast_gb_s: Positive | None
    """GB/s of the broadcast from the trainer to all rollouts (all schedules but headrace); null has none, so that all use the relays."""
    reshard_gb_s: Positive
    """GB/s at which colocated devices convert the trainer's weights to the generator's layout."""


@cache
def _types() -> dict[str, Any]:
    """The types of the settings by name."""
    return get_type_hints(LabSettings, include_extras=True)


@cache
def lab_fields() -> dict[str, kinds.Field]:
    """All settings of the lab by name, without `lab.`."""
    return {entry.name: entry for entry in kinds.type_info(LabSettings).fields}  # pyright: ignore


def lab_of(given: Mapping[str, Any]) -> LabSettings:
    """The settings `lab.*` of a recipe, with the constants of its profile; raises `SettingError` for one that is unknown or not allowed."""
    known = lab_fields()
    usual: dict[str, Any] = {name: field.default for name, field in known.items()}
    typed: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"the nearest is 'lab.{near[0]}'" if near else "headrace plan --help lists all"
            raise SettingError(f"unknown setting 'lab.{name}'; {hint}")
        typed[name] = typed_value(known[name].type, value)
        try:
            typed[name] = msgspec.convert(typed[name], _types()[name], strict=False)
        except msgspec.ValidationError as error:
            allowed = describe(known[name].type)
            raise SettingError(f"lab.{name}={show_value(value)} is not allowed; it takes {allowed}") from error
    chosen = usual | typed
    settings = (
        constants(chosen["profile"], chosen["model"], typed.get("gpus_per_rollout"), chosen["train_gpus"]) | typed
    )
    if missing := [name for name, field in known.items() if field.required and name not in settings]:
        raise SettingError(f"lab.profile=measured has no value of lab.{missing[0]}; set it")
    return msgspec.convert(settings, LabSettings)


def check_lab(given: Mapping[str, Any], schedule: ScheduleName) -> None:
    """The settings of an emulated recipe are known, and fit `run.schedule`."""
    if lab_of(given).colocated and schedule != "sync":
        raise SettingError("lab.colocated: only run.schedule=sync lets trainer and rollouts take turns")


def help_lines() -> Iterator[str]:
    """Every setting of the lab, with its default, type and meaning."""
    return setting_lines("lab", LabSettings, structs.asdict(lab_of({})))
