"""The five schedules: their rules as properties of the hub's state, and the whole system under each."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.system import System

from headrace.comm.messages import GroupId
from headrace.comm.recipe import BatchSettings, QueueSettings, ScheduleName
from headrace.launch.config.checks import check_recipe
from headrace.launch.config.load import SettingError, read_recipe
from headrace.relay.journal import events as ev
from headrace.relay.journal.journal import read_events
from headrace.relay.journal.state import HubState, RowStatus, apply
from headrace.relay.queue.admission import Admission
from headrace.relay.queue.schedules import SCHEDULES
from headrace.rollout.pacing import RolloutPacing
from headrace.trainer.step_log import StepReplay

STEPS = 6


class Run:
    """A run of one-sample groups under a schedule; `log` are its events, in order."""

    def __init__(self, schedule: str, per_step: int) -> None:
        batch = BatchSettings(prompts_per_step=per_step, samples_per_prompt=1)
        self.admission = Admission(batch, QueueSettings(), STEPS, SCHEDULES[schedule])
        self.state = HubState()
        self.log: list[ev.Event] = []
        self.do(ev.Opened(epoch=1, samples_per_prompt=1))

    def do(self, event: ev.Event) -> None:
        apply(event, self.state)
        self.log.append(event)

    def lease(self, version: int) -> bool:
        if not self.admission.may_lease(self.state, version):
            return False
        group = GroupId(0, self.state.cursor)
        self.do(ev.Leased(group=group, samples=[0], attempt=1, version=version, holder="r"))
        return True

    def lease_again(self, version: int) -> None:
        for group_id in list(self.state.unassigned):
            if self.admission.may_lease(self.state, version, self.state.groups[group_id]):
                attempt = 1 + self.state.groups[group_id].rows[0].attempt
                self.do(ev.Leased(group=group_id, samples=[0], attempt=attempt, version=version, holder="r"))

    def end_one(self, choice: int, with_losses: bool) -> None:
        """One of the running trajectories finishes; sometimes one fails, or its holder dies."""
        groups = [g for g in self.state.queued() if g.samples(RowStatus.LEASED)]
        if not groups:
            return
        group = groups[choice % len(groups)]
        row = group.id.row(0)
        if with_losses and choice % 11 == 0:
            self.do(ev.RowFailed(row=row, reason="x"))
        elif with_losses and choice % 7 == 0:
            self.do(ev.Returned(group=group.id, attempt=group.rows[0].attempt, reason="died"))
        else:
            version = group.rows[0].version
            self.do(ev.RowReady(row=row, units=["u"], version=version, num_tokens=1, reward=0.0))

    def train(self) -> None:
        for group in self.admission.select_groups(self.state):
            self.do(ev.Handed(step=self.state.step, groups=[group.id]))
        if self.admission.open_slots(self.state) == 0:
            self.do(ev.Trained(step=self.state.step))

    def play(self, seed: int, with_losses: bool = True) -> None:
        """Play random events until all steps are trained; rollouts hold the newest version or the one before."""
        random = Random(seed)
        for _ in range(3000):
            if self.state.step == STEPS:
                return
            version = max(0, self.state.step - random.randrange(2))
            self.lease_again(version)
            while self.lease(version):
                pass
            self.end_one(random.randrange(10**6), with_losses)
            if random.random() < 0.4:
                self.train()
        raise AssertionError("the run is stuck")


SEEDS = st.integers(0, 10**6)


@pytest.mark.parametrize(("schedule", "bound"), [("sync", 0), ("one_step", 1), ("stream", 1)])
@settings(max_examples=40, deadline=None)
@given(per_step=st.integers(1, 4), seed=SEEDS)
def test_a_schedule_keeps_its_staleness_for_any_order_of_events(schedule: str, bound: int, per_step: int, seed: int):
    run = Run(schedule, per_step)
    run.play(seed)
    assert max(run.state.staleness) <= bound
    assert run.state.account.trained == STEPS * per_step and run.state.is_balanced


@pytest.mark.parametrize("schedule", ["sync", "one_step", "stream"])
@settings(max_examples=40, deadline=None)
@given(per_step=st.integers(2, 4), seed=SEEDS)
def test_no_batch_begins_before_the_one_before_it_is_complete(schedule: str, per_step: int, seed: int):
    run = Run(schedule, per_step)
    run.play(seed, with_losses=False)
    num_begun, num_ended = 0, 0
    for event in run.log:
        if isinstance(event, ev.Leased):
            assert num_ended >= num_begun // per_step * per_step
            num_begun += 1
        num_ended += isinstance(event, ev.RowReady)


@pytest.mark.parametrize("schedule", ["sync", "one_step"])
@settings(max_examples=40, deadline=None)
@given(per_step=st.integers(1, 4), seed=SEEDS)
@example(per_step=2, seed=10312)  # a row that came back may get another version
def test_whole_batches_are_handed_out_at_once(schedule: str, per_step: int, seed: int):
    run = Run(schedule, per_step)
    run.play(seed)
    handed = [isinstance(event, ev.Handed) for event in run.log]
    batches = "".join("x" if is_handed else " " for is_handed in handed).split()
    assert {len(batch) % per_step for batch in batches} == {0}


def test_every_schedule_of_the_recipe_has_rules():
    assert get_args(ScheduleName) == tuple(SCHEDULES)


def test_where_a_batch_is_a_barrier_each_rollout_takes_its_share_at_once():
    pacing = RolloutPacing.of("one_step", batch_groups=3, prompts_per_step=10, num_rollouts=4)
    assert pacing.share == 3 and pacing.free_slots(max_running=1, num_held=1) > 10**6
    assert (RolloutPacing.of("headrace", 5, 10, 4).share, RolloutPacing.of("headrace", None, 10, 4).share) == (5, 3)
    assert RolloutPacing.of("partial", None, 10, 4).share is None
    assert RolloutPacing.of("partial", None, 10, 4).takes_weights(is_outdated=True, is_idle=False)
    assert not RolloutPacing.of("headrace", None, 10, 4).takes_weights(is_outdated=True, is_idle=False)


def test_a_staleness_bound_is_refused_for_a_schedule_that_fixes_it():
    recipe = read_recipe(None, ["run.schedule=stream", "queue.max_staleness=2"])
    with pytest.raises(SettingError, match=r"queue\.max_staleness: run\.schedule=stream"):
        check_recipe(recipe)


# --------------------------------------------------------------------------------------------- the whole system, in memory


def trained(folder: Path, schedule: str, **changes: object) -> tuple[System, dict[str, Any]]:
    """A short run of two rollouts under a schedule, with its summary."""
    settings = {"run.schedule": schedule, "roles.rollout": 2, "run.steps": 4, "batch.prompts_per_step": 4}
    system = System(folder, **(settings | changes)).start_all(num_rollouts=2)
    return system, system.wait()


def events(system: System) -> Iterator[ev.Event]:
    for _, event in read_events(system.dir / "journal.jsonl"):
        yield event


def test_sync_trains_every_batch_on_the_version_that_generated_it(tmp_path: Path):
    system, summary = trained(tmp_path, "sync")
    assert summary["staleness"] == {"0": 4 * 4 * 2}
    leases = [event for event in events(system) if isinstance(event, ev.Leased)]
    assert [lease.version for lease in leases] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert {lease.holder for lease in leases} == {"rollout-0", "rollout-1"}


def test_one_step_generates_the_next_batch_while_it_trains_the_present_one(tmp_path: Path):
    system, summary = trained(tmp_path, "one_step")
    assert summary["staleness"] == {"0": 8, "1": 24}
    versions = [event.version for event in events(system) if isinstance(event, ev.Leased)]
    assert versions == [0] * 8 + [1] * 4 + [2] * 4
    order = [
        type(event).__name__ for event in events(system) if isinstance(event, ev.Handed | ev.Trained | ev.RowReady)
    ]
    assert order[:8] == ["RowReady"] * 8, "nothing is handed out before the batch is complete"


def test_stream_trains_before_the_last_rollout_has_finished(tmp_path: Path):
    system, summary = trained(tmp_path, "stream", **{"sampling.max_new_tokens": 40})
    assert summary["staleness"] == {"0": 8, "1": 24}
    order = [type(event).__name__ for event in events(system) if isinstance(event, ev.Handed | ev.RowReady)]
    first_batch = order[: [i for i, name in enumerate(order) if name == "RowReady"][7]]
    assert "Handed" in first_batch


def test_partial_switches_versions_midway_and_records_the_version_of_each_token(tmp_path: Path):
    changes = {"run.steps": 8, "sampling.max_new_tokens": 120, "batch.prompts_per_step": 2}
    system, summary = trained(tmp_path, "partial", **changes)
    assert summary["accounting"]["holds"] and max(int(n) for n in summary["versions_per_trajectory"]) > 1
    ready = {e.row.key(1): e for e in events(system) if isinstance(e, ev.RowReady)}
    most = 0
    for step in range(8):
        for batch in StepReplay(system.dir, step).batches():
            for row, column in zip(batch.rows, batch["versions"], strict=True):
                versions = column.tolist()
                assert all(a <= b for a, b in pairwise(versions)) and versions[0] == row.version
                assert len(set(versions)) == ready[row.key].num_versions
                most = max(most, len(set(versions)))
    assert most > 1
