"""`queue.lead=auto` beside a queue that is always full: as many tokens a second, of a lower staleness, on emulated devices."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from headrace.launch.config.load import read_recipe
from headrace.launch.lab.emulated import generator as emulated
from headrace.launch.lab.emulated.rewards import EmulatedRewards
from headrace.launch.lab.settings import LabSettings
from headrace.launch.lab.virtual.run import VirtualRun
from headrace.relay.journal.replay import replay
from headrace.rollout.leased_row import LeasedRow

STEPS, GROUPS, SAMPLES = 20, 32, 2


@dataclass(frozen=True)
class Job:
    """Rollouts of four H800s and so many GPUs that train, as in docs/develop/lab.md; a step has a 32nd of the rows, so times are 32 times."""

    rollouts: int
    gpus: int
    growth: float = 1.0
    """Factor on the lengths from the middle of the run on."""
    filtered: float = 0.0
    """Share of the groups that are filtered out."""

    def run(self, folder: Path, lead: object) -> VirtualRun:
        folder.mkdir()
        (folder / "prompts.jsonl").write_text('{"prompt": "p"}\n' * 64)
        settings: dict[str, object] = {
            "rollout.engine": "emulated", "trainer.engine": "emulated", "run.dir": folder, "run.steps": STEPS,
            "data.path": folder / "prompts.jsonl", "roles.rollout": self.rollouts, "batch.prompts_per_step": GROUPS,
            "batch.samples_per_prompt": SAMPLES, "queue.lead": lead, "queue.filter_zero_std": bool(self.filtered),
            "generator.max_running": 16, "sampling.max_new_tokens": 16384, "optimizer.micro_tokens": 16384,
            "repack.period_s": 0, "lab.profile": "papers", "lab.train_us": 820 * 32, "lab.train_gpus": self.gpus,
            "lab.request_us": 41 * 32, "lab.weights_ms": 11.5, "lab.kv_ns": 0, "lab.prefill_us": 0,
            "lab.prompt_tokens": 1, "lab.chain_gb_s": 1e6, "lab.pull_gb_s": 1e6, "lab.stretch": 128,
        }  # fmt: skip
        run = VirtualRun(read_recipe(None, [f"{key}={str(value).lower()}" for key, value in settings.items()]))
        run.run()
        return run


CASES = {
    "trainer-bound": (Job(10, 24), 0.8),
    "balanced": (Job(7, 36), 1.2),
    "rollout-bound": (Job(5, 44), 0.9),
    "longer-midway": (Job(9, 28, growth=1.6), 0.9),
    "filtered": (Job(10, 24, filtered=0.4), 0.8),
}


def measured(folder: Path) -> tuple[float, float]:
    """Tokens a second and mean staleness, without the first steps, which fill the queue, and the last two."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, last = STEPS // 2 - 1, STEPS - 3
    inside = lines[first + 1 : last + 1]
    tokens = sum(line["perf/throughput"] * line["timing_s/step"] for line in inside)
    seconds = lines[last]["time_s"] - lines[first]["time_s"]
    return tokens / seconds, sum(line["staleness/mean"] for line in inside) / len(inside)


def grown(growth: float) -> Callable[[int, int, LabSettings, int], int]:
    """Lengths that are longer from the middle of the run on, in the order in which trajectories begin."""
    length_of, begun = emulated.response_length, set[int]()

    def response_length(seed: int, trajectory_id: int, settings: LabSettings, longest: int) -> int:
        begun.add(trajectory_id)
        length = length_of(seed, trajectory_id, settings, longest)
        return min(longest, round(length * growth)) if len(begun) > STEPS // 2 * GROUPS * SAMPLES else length

    return response_length


def rewards(filtered: float) -> Callable[..., None]:
    """Rewards that are equal in this share of the groups."""

    def submit(self: EmulatedRewards, *rows: LeasedRow) -> None:
        for row in rows:
            is_equal = Random(f"{row.row_id.group}").random() < filtered
            row.reward = 0.0 if is_equal else float(row.row_id.sample)
        self.done += rows

    return submit


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[] if name in ("balanced", "longer-midway") else [pytest.mark.slow]) for name in CASES],
)
def test_a_lead_that_follows_the_trainer_costs_no_throughput_and_lowers_staleness(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
):
    job, staleness = CASES[case]
    found: dict[str, tuple[float, float]] = {}
    for lead in ("auto", 2 * GROUPS):
        with monkeypatch.context() as patch:
            patch.setattr(emulated, "response_length", grown(job.growth))
            patch.setattr(EmulatedRewards, "submit", rewards(job.filtered))
            run = job.run(tmp_path / str(lead), lead)
        found[str(lead)] = measured(tmp_path / str(lead))
        assert replay(tmp_path / str(lead) / "journal.jsonl") == run.hub.state, "the journal gives the same window"
    (speed, lag), (full_speed, full_lag) = found.values()
    assert speed >= 0.99 * full_speed
    # Where the rollouts are slower, the window has what the trainer needs, which they have no room for.
    assert lag <= min(staleness, full_lag + 0.2)
