"""The whole system in memory under each schedule: which versions draw and train the trajectories, and in which order."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from support.system import System

from headrace.relay.journal.events import Handed, Leased, RowReady, Trained
from headrace.trainer.replay.replay import replay_steps
from headrace.trainer.step_log import StepReplay


def trained(folder: Path, schedule: str, **changes: object) -> tuple[System, dict[str, Any]]:
    """A short run of two rollouts under a schedule, with its summary."""
    words = {"run.schedule": schedule, "roles.rollout": 2, "run.steps": 4, "batch.prompts_per_step": 4}
    system = System(folder, **(words | changes)).start_all(num_rollouts=2)
    return system, system.wait()


def versions_of_rows(system: System) -> list[list[int]]:
    """The versions of each trained row, which only grow from token to token and are counted right."""
    ready = {e.row.key(1): e for e in system.events() if isinstance(e, RowReady)}
    found: list[list[int]] = []
    for step in range(system.recipe.run.steps):
        for batch in StepReplay(system.dir, step).batches():
            for row, column in zip(batch.rows, batch["versions"], strict=True):
                versions = column.tolist()
                assert all(a <= b for a, b in pairwise(versions)) and versions[0] == row.version
                found.append(sorted(set(versions)))
                assert len(found[-1]) == ready[row.key].num_versions
    return found


def test_sync_trains_every_batch_on_the_version_that_drew_it(tmp_path: Path):
    system, summary = trained(tmp_path, "sync")
    assert summary["staleness"] == {"0": 4 * 4 * 2}
    leases = [event for event in system.events() if isinstance(event, Leased)]
    assert [lease.version for lease in leases] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert {lease.holder for lease in leases} == {"rollout-0", "rollout-1"}


def test_one_step_generates_the_next_batch_while_one_is_trained(tmp_path: Path):
    system, summary = trained(tmp_path, "one_step")
    assert summary["staleness"] == {"0": 8, "1": 24}
    versions = [event.version for event in system.events() if isinstance(event, Leased)]
    assert versions == [0] * 8 + [1] * 4 + [2] * 4
    order = [type(event).__name__ for event in system.events() if isinstance(event, Handed | Trained | RowReady)]
    assert order[:8] == ["RowReady"] * 8, "no group is handed out before the batch is complete"


def test_stream_trains_before_the_last_rollout_has_finished(tmp_path: Path):
    system, summary = trained(tmp_path, "stream", **{"sampling.max_new_tokens": 40})
    assert summary["staleness"] == {"0": 8, "1": 24}
    order = [type(event).__name__ for event in system.events() if isinstance(event, Handed | RowReady)]
    first_batch = order[: [i for i, name in enumerate(order) if name == "RowReady"][7]]
    assert "Handed" in first_batch


def test_stream_sync_trains_before_the_batch_is_complete_on_the_version_that_drew_it(tmp_path: Path):
    system, summary = trained(tmp_path, "stream_sync", **{"sampling.max_new_tokens": 40})
    assert summary["staleness"] == {"0": 4 * 4 * 2}
    order = [type(event).__name__ for event in system.events() if isinstance(event, Handed | RowReady)]
    first_batch = order[: [i for i, name in enumerate(order) if name == "RowReady"][7]]
    assert "Handed" in first_batch


def test_partial_switches_midway_and_records_which_version_drew_each_token(tmp_path: Path):
    changes = {"run.steps": 8, "sampling.max_new_tokens": 120, "batch.prompts_per_step": 2}
    system, summary = trained(tmp_path, "partial", **changes)
    assert summary["accounting"]["holds"] and max(int(n) for n in summary["versions_per_trajectory"]) > 1
    assert max(map(len, versions_of_rows(system))) > 1


def test_headrace_with_an_age_switches_only_beyond_it_and_each_token_is_exactly_of_its_version(tmp_path: Path):
    changes = {
        "rollout.max_age": 1, "run.steps": 12, "sampling.max_new_tokens": 160, "batch.prompts_per_step": 1,
        "queue.lead": 16, "generator.exact": True,
    }  # fmt: skip
    system, summary = trained(tmp_path, "headrace", **changes)
    assert summary["accounting"]["holds"] and summary["accounting"]["trained"] == 24
    found = versions_of_rows(system)
    assert max(map(len, found)) > 1, "some trajectories went on under new weights"
    assert all(new - old > 1 for versions in found for old, new in pairwise(versions))
    lines = [json.loads(line) for line in (system.dir / "metrics.jsonl").read_text().splitlines()]
    assert not any(line.get("mismatch/logprob_abs_diff") for line in lines)
    assert any(line["staleness/token_mean"] < line["staleness/mean"] for line in lines)
    assert replay_steps(system.recipe) == 0
