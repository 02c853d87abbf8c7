"""A run whose processes stand still for a while trains on data as fresh as before, once they go on."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest
from support.job import Job, MakeJob, child_of, descendants_of

from headrace.relay.journal.events import Trained
from headrace.relay.journal.files import read_events
from headrace.relay.journal.hub_state import HubState
from headrace.relay.journal.state import apply

PROMPTS_PER_STEP = 4
STEPS_BEFORE, STEPS_AFTER = 80, 40


def store_of(run: Job) -> int:
    """Process id of the run's store."""
    assert run.process is not None
    for pid in descendants_of(run.process.pid):
        if b"headrace.comm.store" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("no process of the store")


def freeze_rollouts(run: Job) -> None:
    freeze([child_of(run, "rollout-0"), child_of(run, "rollout-1")], 8.0)


def kill_rollouts(run: Job) -> None:
    for name in ("rollout-0", "rollout-1"):
        os.kill(child_of(run, name), signal.SIGKILL)


def freeze_store(run: Job) -> None:
    freeze([store_of(run)], 15.0)


def freeze(pids: list[int], seconds: float) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)  # the fault itself
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def staleness_by_step(run: Job) -> tuple[list[float], list[float], list[int]]:
    """The mean staleness, the time of the end and the window of each step, from the journal."""
    state, staleness, ends, windows = HubState(), [], [], []
    for _, event in read_events(run.dir / "journal.jsonl"):
        if isinstance(event, Trained):
            groups = [state.groups[group] for group in state.in_training]
            staleness.append(mean(event.step - row.version for group in groups for row in group.rows))
            ends.append(event.t)
        apply(event, state)
        if isinstance(event, Trained):
            windows.append(state.window.num_groups)
    return staleness, ends, windows


@pytest.mark.slow
@pytest.mark.parametrize("stall", [freeze_rollouts, kill_rollouts, freeze_store])
def test_a_stall_does_not_make_later_steps_train_on_old_data(job: MakeJob, stall: Callable[[Job], None]):
    run = job(run__steps=100_000, run__save_rows="none", batch__prompts_per_step=PROMPTS_PER_STEP).start()
    run.wait_for_step(STEPS_BEFORE)
    began = time.time()
    stall(run)
    run.wait_for_step(len(run.metrics()) + STEPS_AFTER)
    run.signal(signal.SIGINT)
    code, output = run.end()
    assert code == 130, output + run.logs()
    staleness, ends, windows = staleness_by_step(run)
    first = next(step for step, end in enumerate(ends) if end > began)
    gaps = {step: ends[step] - ends[step - 1] for step in range(first, len(ends))}
    stalled = max(gaps, key=lambda step: gaps[step])
    # On a busy machine the window is wide before the stall too, and staleness still grows towards it.
    before = max(*staleness[20:stalled], windows[stalled - 1] / PROMPTS_PER_STEP)
    after = staleness[stalled + 2 : stalled + STEPS_AFTER]  # later the load of the machine moves the window more
    assert gaps[stalled] > 1.0
    assert max(after) <= before + 2, f"before {before}, after {after}, windows {windows[stalled - 5 :]}"
