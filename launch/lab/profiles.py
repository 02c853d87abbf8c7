"""Profiles: the constants of emulated devices, by formulas from a model and the number of GPUs. `lab.profile` chooses one.

`papers` has the devices that Laminar describes, with ideal links and an ideal trainer. `program` differs where this program does not
reach them. docs/develop/lab.md has the source of each constant.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """A policy: its weights in bfloat16, its layers, the keys and values of a token, and the GPUs of one rollout."""

    weights_gb: float
    layers: int
    kv_token_bytes: int
    gpus_per_rollout: int

    @property
    def parameters(self) -> float:
        return self.weights_gb / 2 * 1e9


MODELS = {
    "7b": Model(15.2, layers=28, kv_token_bytes=57_344, gpus_per_rollout=1),
    "32b": Model(65.0, layers=64, kv_token_bytes=262_144, gpus_per_rollout=4),
    "72b": Model(145.4, layers=80, kv_token_bytes=327_680, gpus_per_rollout=8),
}
"""Qwen2.5 of these sizes. Keys and values: 2 x layers x key-value heads (4, 8, 8) x 128 x 2 bytes."""

Constants = dict[str, float | int | None]
"""Values of settings `lab.*` by name."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model and the numbers of GPUs from which constants are computed. gpus: of one rollout."""

    model: Model
    gpus: int
    train_gpus: int


def papers(sizes: Sizes) -> Constants:
    """The devices and links of Laminar's evaluation, and a trainer that scales perfectly and never communicates."""
    model = sizes.model
    gpus = sizes.gpus
    request_us = round(2 * model.parameters / (gpus * 396e12) * 1e6, 1)
    return {
        "weights_ms": round(model.weights_gb / (gpus * 1.64), 1),
        "request_us": request_us,
        "kv_ns": round(model.kv_token_bytes / (gpus * 2.15e12) * 1e9, 1),
        "prefill_us": request_us,
        "host_ms": 0.0,
        "kv_tokens": max(1000, int(round((gpus * 62.1 - model.weights_gb) * 1e9 / model.kv_token_bytes, -3))),
        "kv_token_bytes": model.kv_token_bytes,
        "kv_gb_s": 50.0,
        "train_us": 5 * gpus * request_us,
        "trainer_ranks": 1,
        "collectives_s": 0.0,
        "update_s": 0.0,
        "weights_gb": model.weights_gb,
        "push_gb_s": 100.0,
        "chain_gb_s": 80.0,
        "pull_gb_s": 25.0,
        "broadcast_gb_s": 54.0,
        "reshard_gb_s": 32.0,
    }


def program(sizes: Sizes) -> Constants:
    """The same GPUs with what this program does on them: its links, its tensor-parallel rollouts, its sharded trainer."""
    model = sizes.model
    is_parallel = sizes.gpus > 1
    return papers(sizes) | {
        "host_ms": round(0.2625 * model.layers, 1) if is_parallel else 0.0,
        "kv_gb_s": None if is_parallel else 3.0,
        "train_us": round(8 * model.parameters / 327e12 * 1e6, 1),
        "trainer_ranks": sizes.train_gpus,
        # Two gathers in bfloat16, and a sum of fp32 gradients.
        "collectives_s": round(4 * model.weights_gb / 200, 2),
        # Reads and writes of weights, moments and gradients, and those of the gradients' norm.
        "update_s": round(36 * model.parameters / (sizes.train_gpus * 2.15e12), 3),
        "push_gb_s": 12.0 * sizes.train_gpus,
        "chain_gb_s": 3.0,
        "pull_gb_s": 8.7,
        "broadcast_gb_s": None,  # all schedules publish through the relays
    }


PROFILES: Mapping[str, Callable[[Sizes], Constants]] = {"papers": papers, "program": program, "measured": lambda _: {}}
"""The devices that the planner has measured are given by their settings alone."""


def constants(profile: str, model: str, gpus_per_rollout: int | None, train_gpus: int) -> Constants:
    """The constants of a profile, with the GPUs of a rollout; null takes those that the model needs."""
    found = MODELS[model]
    gpus = gpus_per_rollout or found.gpus_per_rollout
    return {"gpus_per_rollout": gpus, **PROFILES[profile](Sizes(found, gpus, train_gpus))}
