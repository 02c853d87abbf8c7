"""Learning under asynchrony: steps and seconds until the reward reaches a target, on real runs of the quickstart's recipe.

The seeds take turns, and within a seed its variants, so that other load on the machine affects all alike. A target is reached at
the first step whose reward, as a mean with the two steps before it, is there; a run that does not get there counts with all its
steps. Seconds count from the end of the first step, which contains the warm-up of the processes.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.launch.lab.warm_up import run_to_end
from headrace.launch.processes.child import print_message

from .harness import Measurement, Options, medians
from .recipes import count_word

_WINDOW = 3


@dataclass(frozen=True, slots=True)
class Job:
    """A task with its target. `steps` are those of a run for each learning rate, enough for the slowest variant of interest."""

    settings: tuple[str, ...]
    target: float
    steps: Mapping[float, int]
    lr: float
    """The rate at which the corrections are compared."""


STORIES = Job(
    settings=(
        f"reward.path={Path(count_word.__file__)}:reward",
        "batch.prompts_per_step=8",
        "sampling.max_new_tokens=48",
        "optimizer.warmup_steps=0",
    ),
    target=5.0,
    steps={3e-4: 30, 1e-3: 20, 2e-3: 14},
    lr=1e-3,
)
"""A story model of `--policy` learns to repeat a word."""
SORTING = Job(settings=(), target=0.7, steps={3e-4: 120}, lr=3e-4)
"""The quickstart's own policy sorts digits."""

SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "sync": ("run.schedule=sync",),
    "headrace": ("run.schedule=headrace",),
    "headrace-bound-1": ("run.schedule=headrace", "queue.max_staleness=1"),
}
"""Settings of each schedule; the others are compared with the first."""
CORRECTIONS: Mapping[str, tuple[str, ...]] = {
    "dppo-token": (),
    "truncate-token": ("algorithm.importance_sampling=token_truncate",),
    "truncate-sequence": ("algorithm.importance_sampling=sequence_truncate",),
    "mask-token": ("algorithm.importance_sampling=token_mask",),
    "mask-sequence": ("algorithm.importance_sampling=sequence_mask",),
    "clip-rollout": ("algorithm.proximal=rollout",),
}
"""Settings of each correction; the first is the default."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one run."""

    steps: int
    seconds: float
    staleness: float
    reward: float


def rates(name: str, options: Options) -> list[Measurement]:
    """`headrace`, without and with a bound of 1 on staleness, over `sync` at each learning rate of the job."""
    job = STORIES if options.policy else SORTING
    variants = {
        f"{schedule}-{lr:g}": (*words, f"optimizer.lr={lr}", f"run.steps={steps}")
        for lr, steps in job.steps.items()
        for schedule, words in SCHEDULES.items()
    }
    outcomes = run_all(job, variants, options)
    peer, *others = SCHEDULES
    pairs = [(f"{peer}-{lr:g}", f"{ours}-{lr:g}") for lr in job.steps for ours in others]
    return [row for peer, ours in pairs for row in rows_of(ours, outcomes[ours], peer, outcomes[peer])]


def corrections(name: str, options: Options) -> list[Measurement]:
    """`headrace` with each correction over the default one."""
    job = STORIES if options.policy else SORTING
    common = ("run.schedule=headrace", f"optimizer.lr={job.lr}", f"run.steps={job.steps[job.lr]}")
    outcomes = run_all(job, {name: (*common, *words) for name, words in CORRECTIONS.items()}, options)
    default = next(iter(CORRECTIONS))
    return [row for ours in CORRECTIONS for row in rows_of(ours, outcomes[ours], default, outcomes[default])]


def run_all(job: Job, variants: Mapping[str, Sequence[str]], options: Options) -> dict[str, list[Outcome]]:
    """By variant the outcome of each seed."""
    found: dict[str, list[Outcome]] = {name: [] for name in variants}
    for seed in range(options.seeds):
        for name, words in variants.items():
            outcome = run_once([*job.settings, *words, f"run.seed={seed}"], job.target, options.policy)
            found[name].append(outcome)
            print_message(
                f"seed {seed} {name:<18} {outcome.steps:>3} steps {outcome.seconds:6.2f} s"
                f"  staleness {outcome.staleness:.2f}  final reward {outcome.reward:.3f}"
            )
    return found


def run_once(words: Sequence[str], target: float, policy: str | None) -> Outcome:
    """Run the quickstart with these settings; raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        settings = [f"run.dir={run_dir}", "run.save_rows=none", "roles.rollout=1", *words]
        if policy:
            settings.append(f"model.path={policy}")
        if code := run_to_end([sys.executable, "-m", "headrace", "quickstart", *settings]):
            raise RuntimeError(f"a run ended with {code}: {' '.join(settings)}")
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return outcome_of([json.loads(line) for line in lines], target)


def outcome_of(metrics: Sequence[Mapping[str, Any]], target: float) -> Outcome:
    """The figures of a run from the metrics of its steps."""
    rewards = [row["reward/mean"] for row in metrics]
    ends = range(_WINDOW, len(rewards) + 1)
    steps = next((end for end in ends if statistics.fmean(rewards[end - _WINDOW : end]) >= target), len(rewards))
    return Outcome(
        steps=steps,
        seconds=metrics[steps - 1]["time_s"] - metrics[0]["time_s"],
        staleness=statistics.fmean(row["staleness/mean"] for row in metrics),
        reward=statistics.fmean(rewards[-_WINDOW:]),
    )


def rows_of(name: str, ours: Sequence[Outcome], peer: str, theirs: Sequence[Outcome]) -> list[Measurement]:
    """Steps and seconds to the target with their ratios to a peer seed by seed, the mean staleness and the final reward."""

    def row(field: str, unit: str, mine: Outcome, other: Outcome) -> Measurement:
        value, base = getattr(mine, field), getattr(other, field)
        return Measurement(f"{name}-{field}", peer, value, unit, value / base if base else float("nan"))

    fields = {"steps": "steps", "seconds": "s", "staleness": "", "reward": ""}
    pairs = zip(ours, theirs, strict=True)
    return medians([[row(field, unit, *pair) for field, unit in fields.items()] for pair in pairs])
