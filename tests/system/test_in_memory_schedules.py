"""The whole system in memory under each schedule: which versions draw and train the trajectories, and in which order."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from support.system import System

from headrace.relay.journal.events import Handed, Leased, RowReady, Trained
from headrace.trainer.step_log import StepReplay


def trained(folder: Path, schedule: str, **changes: object) -> tuple[System, dict[str, Any]]:
    """A short run of two rollouts under a schedule, with its summary."""
    words = {"run.schedule": schedule, "roles.rollout": 2, "run.steps": 4, "batch.prompts_per_step": 4}
    system = System(folder, **(words | changes)).start_all(num_rollouts=2)
    return system, system.wait()


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
    ready = {e.row.key(1): e for e in system.events() if isinstance(e, RowReady)}
    most = 0
    for step in range(8):
        for batch in StepReplay(system.dir, step).batches():
            for row, column in zip(batch.rows, batch["versions"], strict=True):
                versions = column.tolist()
                assert all(a <= b for a, b in pairwise(versions)) and versions[0] == row.version
                assert len(set(versions)) == ready[row.key].num_versions
                most = max(most, len(set(versions)))
    assert most > 1
