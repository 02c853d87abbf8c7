"""A run that gets nowhere says so, and ends with its cause; one that is only slow does not end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from support.hub_scene import Scene
from support.in_memory import MemoryFleet

from headrace.comm.messages import LoadReport, RequestRows, RowDone, RowsNotFound
from headrace.comm.messages.run import DrainRequested
from headrace.relay.hub import health
from headrace.relay.hub.health import FIRST_ALARM_S, PATIENCE_S
from headrace.relay.hub.loop import HubLoop
from headrace.relay.journal import events as ev
from headrace.relay.journal.records import Losses
from headrace.relay.journal.replay import replay


class Run(Scene):
    """A scene of groups of two samples, two groups a step, whose rollout finishes each group at once."""

    num_requests = 0

    def ask(self) -> None:
        """The trainer asks for the groups of the step in progress."""
        self.num_requests += 1
        step, received = self.hub.state.step, len(self.hub.state.in_training)
        self.say("actor-0", RequestRows(self.num_requests, ["train"], step, received))

    def generate(self, groups: int, reward: Callable[[int], float] = lambda _: 1.0, failure: str = "") -> None:
        for _ in range(groups):
            self.num_requests += 1
            for lease in self.lease(request=self.num_requests).leases:
                for sample in lease.samples:
                    row, units = lease.group.row(sample), [] if failure else ["relay-0#1"]
                    rewarded = None if failure else reward(sample)
                    self.say("rollout-0", RowDone(row, lease.attempt, 0, units, 5, rewarded, failure=failure))

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            self.hub.health.watch()

    @property
    def failure(self) -> str:
        return self.hub.context.failure


class MakeRun(Protocol):
    def __call__(self, **settings: int | bool | str | None) -> Run: ...


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRun]:
    runs: list[Run] = []

    def open_run(**settings: int | bool | str | None) -> Run:
        runs.append(Run(tmp_path, **settings))  # pyright: ignore[reportArgumentType]
        return runs[-1]

    yield open_run
    for run in runs:
        run.close()


def test_groups_in_vain_are_a_line_at_10_100_and_so_on(make: MakeRun, capsys: pytest.CaptureFixture[str]):
    run = make(filter_zero_std=True, max_lost_batches=None)
    run.ask()
    run.generate(120)
    first, second = capsys.readouterr().out.splitlines()
    equal = "were filtered out (all rewards of a group are equal)"
    assert first == f"none of the last 10 groups can be trained, since step 0: no trajectory failed, 20 {equal}"
    assert "none of the last 100 groups" in second and f"200 {equal}" in second
    assert not run.failure


def test_a_run_whose_groups_are_all_filtered_out_ends_with_its_cause(make: MakeRun):
    run = make(filter_zero_std=True, max_lost_batches=40)
    run.ask()
    run.generate(79)
    assert not run.failure
    run.generate(1)
    assert "none of the last 80 groups can be trained" in run.failure and "queue.max_lost_batches" in run.failure
    assert "160 were filtered out (all rewards of a group are equal)" in run.failure and "\n" not in run.failure
    loop = HubLoop(run.hub, MemoryFleet.join_network(run.network, "hub"))
    assert loop.step() == ev.Ending(status="failed", error=run.failure, exit_code=1)


def test_a_run_whose_trajectories_all_fail_ends_with_the_first_reason(make: MakeRun):
    run = make()
    run.ask()
    run.generate(1, failure="OSError: the judge is down")
    run.generate(63, failure="OSError: again")
    assert "none of the last 64 groups" in run.failure, "of small batches 20 are too few for a verdict"
    assert "128 trajectories failed (OSError: the judge is down)" in run.failure


def test_one_group_that_can_be_trained_begins_the_count_again(make: MakeRun):
    run = make(filter_zero_std=True)
    run.ask()
    run.generate(60)
    run.generate(1, reward=float)
    assert len(run.hub.state.in_training) == 1
    run.generate(60)
    assert not run.failure
    run.generate(4)
    assert run.failure


def test_a_trainer_that_is_not_ready_yet_does_not_end_a_run_that_filters(make: MakeRun):
    run = make(filter_zero_std=True, lead=2)
    run.generate(1, reward=float)
    run.generate(200)
    assert not run.failure, "a group waits for it"


def test_filtered_groups_of_one_sample_end_the_run(make: MakeRun):
    run = make(samples=1, filter_zero_std=True)
    run.ask()
    run.generate(64, reward=lambda _: run.num_requests)
    assert "64 were filtered out" in run.failure


def test_without_a_limit_a_run_filters_for_ever(make: MakeRun):
    run = make(filter_zero_std=True, max_lost_batches=None)
    run.ask()
    run.generate(300)
    assert not run.failure


def test_the_next_hub_counts_on(make: MakeRun):
    run = make(filter_zero_std=True)
    run.ask()
    run.generate(30)
    run.generate(2, failure="ValueError")
    losses = replay(run.path).losses
    assert losses == run.hub.state.losses
    assert (losses.in_vain, losses.filtered, losses.failed, losses.failure) == (64, 60, 4, "ValueError")


def test_the_time_of_a_step_is_smoothed_and_the_counts_begin_again():
    losses = Losses(began=100.0, failed=3, in_vain=3).next_step(110.0)
    assert losses == Losses(began=110.0, step_s=10.0)
    assert losses.next_step(130.0).step_s == pytest.approx(13.0)
    assert losses.next_step(90.0).step_s == pytest.approx(7.0), "the clock was set back"


def test_a_time_without_a_step_is_an_alarm_at_growing_intervals(make: MakeRun, capsys: pytest.CaptureFixture[str]):
    run = make()
    run.ask()
    run.lease()
    run.wait(FIRST_ALARM_S - 1)
    assert not capsys.readouterr().out
    run.wait(FIRST_ALARM_S * 4)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == (
        "alarm: no step for 60 s: no trajectory failed; the trainer waits for groups, 2 trajectories are with rollout-0"
    )
    assert "no step for 120 s" in second and "no step for 240 s" in third


def test_an_evaluation_that_moves_is_no_alarm_however_long_it_takes(make: MakeRun, capsys: pytest.CaptureFixture[str]):
    run = make()
    run.ask()
    run.hub.state.evaluations.num_leased = 4
    for tokens in range(10):
        run.say("rollout-0", report(tokens))
        run.wait(FIRST_ALARM_S - 1)
    assert not capsys.readouterr().out
    run.wait(2 * FIRST_ALARM_S)
    assert "no step for 60 s: no trajectory failed; an evaluation is under way" in capsys.readouterr().out


def test_an_evaluation_that_stands_still_is_an_alarm_while_the_trainer_does_not_ask_either(
    make: MakeRun, capsys: pytest.CaptureFixture[str]
):
    run = make()
    run.hub.state.evaluations.num_leased = 4
    run.wait(2 * FIRST_ALARM_S)
    assert "no step for 60 s: no trajectory failed; the trainer does not ask for groups" in capsys.readouterr().out


def test_the_time_after_the_last_step_is_no_alarm(make: MakeRun, capsys: pytest.CaptureFixture[str]):
    run = make()
    run.hub.state.step = run.hub.leases.admission.num_steps
    run.ask()
    run.wait(FIRST_ALARM_S * 4)
    assert not capsys.readouterr().out, "the last evaluation, or the model, is under way"


def test_slow_steps_are_no_alarm(make: MakeRun, capsys: pytest.CaptureFixture[str]):
    run = make()
    run.hub.state.losses.step_s = 100.0
    run.ask()
    run.wait(499)
    assert not capsys.readouterr().out
    run.wait(1)
    assert "no step for 500 s" in capsys.readouterr().out


def test_a_run_in_which_nothing_moves_ends_after_a_long_time_and_names_who_waits(make: MakeRun):
    run = make()
    run.ask()
    run.lease()
    run.wait(PATIENCE_S)
    assert not run.failure
    run.wait(1)
    assert "nothing has moved for 3,600 s: the trainer waits for groups" in run.failure
    assert "2 trajectories are with rollout-0" in run.failure


@pytest.mark.parametrize("takers", ["rollout", "agent"])
def test_where_nobody_takes_groups_the_alarm_names_who_should(
    make: MakeRun, takers: str, capsys: pytest.CaptureFixture[str]
):
    run = make()
    run.hub.health.takers = takers
    run.ask()
    run.wait(60)
    assert f"no step for 60 s: no trajectory failed; the trainer waits for groups, and no {takers} has any" in (
        capsys.readouterr().out
    )


def test_groups_that_the_sampler_holds_back_are_named_as_what_the_trainer_waits_for(
    make: MakeRun, monkeypatch: pytest.MonkeyPatch
):
    run = make()
    monkeypatch.setattr(type(run.hub.health.dispatcher.admission), "select_groups", lambda *_: [])
    run.ask()
    run.generate(1)
    run.wait(PATIENCE_S + 1)
    assert "the trainer waits for more groups (complete: 1)" in run.failure


def report(tokens: int) -> LoadReport:
    return LoadReport(
        version=0, num_running=2, num_waiting=0, kv_util=0.5, tokens=tokens, busy_s=1.0, idle_s=0.0, pull_s=0.0
    )


def test_a_long_generation_never_ends_a_run(make: MakeRun):
    run = make()
    run.ask()
    run.lease()
    for tokens in range(5):
        run.say("rollout-0", report(tokens))
        run.wait(PATIENCE_S - 1)
    assert not run.failure


def drain(run: Run) -> None:
    run.ask()
    run.say("hub", DrainRequested("rollout-0"))
    run.say("hub", DrainRequested("rollout-1"))


def restore(run: Run) -> None:
    run.ask()
    run.hub.context.awaits_queue = True


def work_in_the_trainer(run: Run) -> None:
    """It compiles, trains or catches up, and does not ask."""
    run.lease()


def train_ahead(run: Run) -> None:
    """It trains the last groups of this step, and asks for those of the next one."""
    run.say("actor-0", RequestRows(1, ["train"], run.hub.state.step + 1))


@pytest.mark.parametrize("state", [drain, restore, work_in_the_trainer, train_ahead])
def test_a_run_that_waits_for_something_else_than_its_rollouts_does_not_end(
    make: MakeRun, state: Callable[[Run], None]
):
    run = make()
    state(run)
    run.wait(2 * PATIENCE_S)
    assert not run.failure


def test_a_run_whose_rollouts_never_ask_ends(make: MakeRun):
    run = make()
    run.ask()
    run.wait(PATIENCE_S + 1)
    assert "the trainer waits for groups, and no rollout has any" in run.failure


def test_time_in_which_the_hub_stood_still_itself_does_not_count(make: MakeRun, capsys: pytest.CaptureFixture[str]):
    run = make()
    run.ask()
    run.lease()
    run.wait(10)
    run.now += 10 * PATIENCE_S
    run.wait(10)
    assert not run.failure and not capsys.readouterr().out


def test_rows_that_are_lost_again_and_again_are_an_alarm(make: MakeRun, capsys: pytest.CaptureFixture[str]):
    run = make()
    for _ in range(11):
        run.generate(1)
        (group,) = run.hub.state.queued()
        rows = [group.row_id(0), group.row_id(1)]
        run.say("reference-0", RowsNotFound(rows, [group.rows[0].attempt] * 2, "no copy"))
    alarms = capsys.readouterr().out.splitlines()
    assert len(alarms) == 2, "after more than 4 times the rows in flight, and after twice that"
    assert alarms[0] == "alarm: 10 rows were lost after step 0: reference-0: no copy"


def test_the_hubs_loop_looks_at_the_time(
    make: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(health, "FIRST_ALARM_S", 1.0)
    run = make()
    loop = HubLoop(run.hub, MemoryFleet.join_network(run.network, "hub"))
    run.now += 1.5
    loop.step()
    assert "alarm: no step for 2 s" in capsys.readouterr().out


def test_the_alarm_that_no_step_came_is_not_told_after_one_has_come(make: MakeRun):
    run = make()
    run.wait(2 * FIRST_ALARM_S)
    assert run.hub.context.alarm.endswith("the trainer has not published the policy yet, which it loads first")
    run.hub.state.step += 1
    run.wait(1.0)
    assert not run.hub.context.alarm
    run.hub.context.keep_alarm("another")
    run.hub.state.step += 1
    run.wait(1.0)
    assert run.hub.context.alarm == "after step 1: another"
