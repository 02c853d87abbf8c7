"""A run as emulated devices: times, speeds and lengths that a finished run measured, as settings `lab.*`.

Sums are kept: with the measured terms, the emulated generators and trainer are busy for as many seconds as the real ones were.
docs/use/planner.md has the formulas.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from msgspec import structs, to_builtins

from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from ...relay.journal.events import Leased, RowReady
from ...relay.journal.files import read_events
from ..config.run_folder import JOURNAL_FILE, METRICS_FILE
from ..report.planned import LAST_STEPS, WARM_UP_STEPS
from ..report.timeline import Span, Timeline
from .figures import Window, window_of
from .settings import LabSettings

MOST_LENGTHS = 256
"""Lengths of a profile, each the mean of equally many responses."""
_STEPS_PER_CHECK = 64
"""Decode steps of a mean response over those between two checks for messages."""
_LEAST_S = 1e-6


def measured_part(run_dir: Path) -> tuple[Timeline, Window]:
    """The timeline of a finished run, and the part of it that is measured: since its trainer was started last, as when it was resumed.

    Raises `SettingError` for a run without."""
    timeline = Timeline.read(run_dir)
    num_steps = len(_steps(run_dir))
    if not timeline.spans.get("actor-0") or "rollout-0" not in timeline.spans:
        raise SettingError(
            f"--from: {run_dir} has no trace of a trainer and a rollout; a finished run keeps its trace if it was started"
            " with --trace. Run its recipe again that way for some steps, or leave out --from for a warm-up run"
        )
    trainer = [span for span in timeline.spans["actor-0"] if span.start >= timeline.started.get("actor-0", 0.0)]
    begun = min((span.facts["step"] for span in trainer if span.state == "train"), default=num_steps)
    if num_steps - begun <= WARM_UP_STEPS + LAST_STEPS:
        raise SettingError(
            f"--from: {run_dir} has {num_steps - begun} steps since its trainer was started last; more than"
            f" {WARM_UP_STEPS + LAST_STEPS} are needed"
        )
    timeline.spans["actor-0"] = trainer
    return timeline, window_of(timeline, num_steps, begun)


def profile_of(run_dir: Path, recipe: Recipe) -> LabSettings:
    """The devices of the run in `run_dir`, whose recipe is given. Raises `SettingError` if its files do not tell them."""
    timeline, window = measured_part(run_dir)
    steps = _steps(run_dir)[window.first : window.last]
    events = [event for _, event in read_events(run_dir / JOURNAL_FILE)]
    inside = [event for event in events if window.start <= event.t < window.end]
    num_rows = sum(sum(step["staleness/hist"].values()) for step in steps)
    responses = fmean(step["response_length/mean"] for step in steps)
    num_prompt = max(1, round(sum(map(_num_tokens, steps)) / num_rows - responses))
    num_leases = sum(isinstance(event, Leased) for event in inside)
    lengths = [event.num_tokens - num_prompt for event in inside if isinstance(event, RowReady)]
    if not lengths:
        raise SettingError(
            f"--from: no response was finished in the measured part of {run_dir}; use a run with more steps"
        )
    return LabSettings(
        profile="measured",
        host_ms=0.0,
        kv_gb_s=None if recipe.rollout.tp > 1 else 50.0,  # ranks of a replica export no caches
        trainer_ranks=1,
        collectives_s=0.0,
        reshard_gb_s=32.0,
        prompt_tokens=num_prompt,
        lengths=equal_parts(lengths),
        stretch=max(1, min(32, int(responses) // _STEPS_PER_CHECK)),
        gpus_per_rollout=recipe.rollout.tp,
        **_generators(timeline, window, num_leases * num_prompt),
        **_trainer(
            timeline.spans["actor-0"], window.first, steps, recipe.roles.actor, recipe.batch.updates_per_version
        ),
        **_weights(timeline, window, steps, recipe.rollout.tp),
    )


def relay_seconds(run_dir: Path, num_relays: int) -> float:
    """Seconds of a processor that the relays together take for a trained token, in the run in `run_dir`."""
    steps = _steps(run_dir)[WARM_UP_STEPS:-LAST_STEPS]
    busy = [(1 - step.get("idle/relay", 1.0)) * step["timing_s/step"] for step in steps]
    return num_relays * sum(busy) / sum(map(_num_tokens, steps))


def emulated_recipe(recipe: Recipe, profile: LabSettings) -> Recipe:
    """The recipe on the emulated devices of a profile. Raises `SettingError` for work that they do not have."""
    queue = recipe.queue
    run = recipe.run
    unknown = {
        "environment": recipe.environment.is_set, "queue.tasks": queue.tasks, "queue.filter_zero_std": queue.filter_zero_std,
        "algorithm.kl_coef": recipe.algorithm.kl_coef, "rollout.engine": recipe.rollout.engine == "emulated",
    }  # fmt: skip
    for name, is_set in unknown.items():
        if is_set:
            raise SettingError(f"{name}: emulated devices cannot simulate this work, so a plan would be wrong")
    actors = recipe.roles.actor
    rollouts = recipe.roles.rollout // recipe.rollout.tp
    return Recipe(
        run=structs.replace(run, resume="never", save_rows="none"),
        roles=structs.replace(recipe.roles, actor=1, rollout=rollouts, reference=0, task=0),
        batch=structs.replace(recipe.batch, passes=1),
        sampling=recipe.sampling,
        generator=recipe.generator,
        rollout=structs.replace(recipe.rollout, engine="emulated", tp=1),
        trainer=structs.replace(recipe.trainer, engine="emulated", shard_ranks=None),
        optimizer=structs.replace(recipe.optimizer, micro_tokens=recipe.optimizer.micro_batch * actors),
        queue=structs.replace(queue, sampler=""),
        repack=recipe.repack,
        lab=to_builtins(structs.replace(profile, train_gpus=actors, gpus_per_rollout=recipe.rollout.tp)),
    )


def equal_parts(lengths: Sequence[int]) -> tuple[int, ...]:
    """At most `MOST_LENGTHS` lengths with the distribution and the mean of the given ones: means of equal parts in order."""
    parts = np.array_split(np.sort(np.maximum(lengths, 1)), min(MOST_LENGTHS, len(lengths)))
    return tuple(max(1, round(float(part.mean()))) for part in parts)


def training_costs(tokens: np.ndarray, micro_batches: np.ndarray, seconds: np.ndarray) -> tuple[float, float, float]:
    """Seconds of an update, of a token and of a micro-batch, from the steps of a run, [n] each; they explain the mean step.

    The least-squares term of a micro-batch counts from twice its standard error on; before that the steps do not tell it from the
    update and the tokens, where its time is then. It is the slope through what tokens leave of counts and of seconds (Frisch and Waugh, 1933).
    """
    columns = np.column_stack([np.ones(len(tokens)), tokens])
    both = np.column_stack([micro_batches, seconds])
    counts, left = (both - columns @ np.linalg.lstsq(columns, both, rcond=None)[0]).T
    spread = float(counts @ counts)
    num_free = len(tokens) - 3
    micro_batch_s = 0.0
    if num_free > 0 and spread > 1e-6 * float(np.square(micro_batches).sum()):
        slope = float(counts @ left) / spread
        error = math.sqrt(float(np.square(left - slope * counts).sum()) / num_free / spread)
        micro_batch_s = min(slope, float(seconds.mean() / micro_batches.mean())) if slope > 2 * error else 0.0
    update_s, token_s = line_through(tokens.tolist(), (seconds - micro_batch_s * micro_batches).tolist())
    return update_s, token_s, micro_batch_s


def line_through(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope by least squares, both at least 0, through the point of the means."""
    mean_x = fmean(x)
    mean_y = fmean(y)
    spread = sum((each - mean_x) ** 2 for each in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0
    slope = min(slope, mean_y / mean_x) if slope > 0 else 0.0
    return mean_y - slope * mean_x, slope


def _steps(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of each step."""
    path = run_dir / METRICS_FILE
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _fetch_s(step: dict[str, Any]) -> float:
    """Seconds that the trainer waited in a step though groups were ready; 0 where the hub does not measure that."""
    waited_s = step["timing_s/wait_data"]
    return max(0.0, waited_s - step.get("queue/starved_s", waited_s))


def _num_tokens(step: dict[str, Any]) -> float:
    """Tokens of prompts and responses that a step trained."""
    return step["perf/throughput"] * step["timing_s/step"]


def _generators(timeline: Timeline, window: Window, num_prefilled: int) -> dict[str, Any]:
    """Terms of a step of the rollouts together; time that decoding does not explain is that of turns and of prefills."""
    sums = np.zeros(4)
    terms = np.zeros(3)
    generate_s = 0.0
    last = {}
    for name in (name for name in timeline.spans if name.startswith("rollout-")):
        start = max(window.start, timeline.started.get(name, 0.0))  # the numbers of a process begin at 0
        samples = [each for each in timeline.samples[name] if start <= each.at < window.end]
        if not samples or "step_kv" not in samples[-1].values:
            continue
        first = samples[0].values
        last = samples[-1].values
        grown = np.array([last[key] - first[key] for key in ("steps", "step_tokens", "step_kv", "step_s")])
        part = Window(window.first, window.last, samples[0].at, samples[-1].at)
        generate_s += sum(part.share(span) for span in timeline.spans[name] if span.state == "generate")
        terms += grown[0] * np.array([last["fixed_s"], last["trajectory_s"], last["token_s"]])
        sums += grown
    num_steps = float(sums[0])
    step_s = float(sums[3])
    if not num_steps or not terms.any():
        raise SettingError("--from: its rollouts reported no decode steps; use a run of this version with more steps")
    terms /= num_steps
    decode_s = float(terms @ sums[:3])
    terms *= min(1.0, step_s / decode_s)
    turn_s = max(0.0, generate_s - step_s) / num_steps
    return {
        "step_ms": float(terms[0] + turn_s) * 1e3,
        "weights_ms": 0.0,
        "request_us": float(terms[1]) * 1e6,
        "kv_ns": float(terms[2]) * 1e9,
        "prefill_us": max(0.0, step_s - decode_s) / max(num_prefilled, 1) * 1e6,
        "kv_tokens": int(last["kv_tokens"]),
        "kv_token_bytes": int(last["kv_token_bytes"]),
    }


def _trainer(
    spans: Sequence[Span], first: int, steps: Sequence[dict[str, Any]], actors: int, num_updates: int
) -> dict[str, Any]:
    """Times of a token, an update and a micro-batch, from each step's training; fetching rows that are ready counts with the update."""
    seconds: defaultdict[int, float] = defaultdict(float)
    for span in spans:
        if span.state == "train":
            seconds[span.facts["step"]] += span.end - span.start
    trained = [seconds[first + number] for number in range(len(steps))]
    tokens, micro_batches = np.array([(_num_tokens(step), step.get("perf/micro_batches", 0.0)) for step in steps]).T
    update_s, token_s, micro_batch_s = training_costs(tokens, micro_batches, np.array(trained))
    update_s += fmean(map(_fetch_s, steps))
    return {
        "train_gpus": actors,
        "train_us": token_s * actors * 1e6,
        "update_s": update_s / num_updates,
        "micro_batch_s": micro_batch_s,
    }


def _weights(timeline: Timeline, window: Window, steps: Sequence[dict[str, Any]], tp: int) -> dict[str, Any]:
    """Speeds of the weights' way. The chain of relays counts like another push."""
    gigabytes = steps[-1]["weights/bytes"] / 1e9
    push_s = _mean_s(timeline, window, "actor-0", "publish")
    pull_s = _mean_s(timeline, window, "rollout-", "pull")
    speeds = dict.fromkeys(("push_gb_s", "chain_gb_s"), gigabytes / push_s)
    return {"weights_gb": gigabytes, **speeds, "pull_gb_s": gigabytes / tp / pull_s, "broadcast_gb_s": None}


def _mean_s(timeline: Timeline, window: Window, process: str, state: str) -> float:
    """Mean seconds of a state of the processes whose names begin so."""
    spans = [span for name, all_spans in timeline.spans.items() if name.startswith(process) for span in all_spans]
    lasted = [span.end - span.start for span in spans if span.state == state and window.share(span) > 0]
    return max(fmean(lasted or [0.0]), _LEAST_S)
