"""Advice on the balance of a run, by hand."""

import pytest

from headrace.comm.environment import CORES
from headrace.launch.config.load import read_recipe
from headrace.trainer.alarms.balance import LEAST_STEPS, TOLD_AFTER, WARM_UP_STEPS, Balance, Layout, advise, layout_of


@pytest.mark.parametrize(
    ("layout", "busy", "change", "gain"),
    [
        # Two cores, a thread each: 1 + 0.18 core steps on both cores take 0.59 of a step.
        (Layout(1, 1, cores=2), (1.0, 0.18), "trainer.threads=2 rollout.threads=1", 1 / 0.59),
        # 16 cores, 12 + 4: the rollout's 0.4 core steps fit on one core, and 15 / 12 is the trainer's gain.
        (
            Layout(1, 1, cores=16, actor_threads=12, rollout_threads=4),
            (1.0, 0.1),
            "trainer.threads=15 rollout.threads=1",
            1.25,
        ),
        # The rollout sets the pace: it has 4 core steps and the trainer 3.6, so 8 cores each take half of a step.
        (
            Layout(1, 1, cores=16, actor_threads=12, rollout_threads=4),
            (0.3, 1.0),
            "trainer.threads=8 rollout.threads=8",
            2.0,
        ),
        # Four GPUs: two trainers always busy, two rollouts a fifth of the time.
        (Layout(2, 2), (1.0, 0.2), "roles.actor=3 roles.rollout=1", 1.5),
        (Layout(6, 2), (0.2, 1.0), "roles.actor=3 roles.rollout=5", 2.5),
        # Replicas of two ranks move together: one is 2 of 6 ranks.
        (Layout(2, 6, tp=2), (1.0, 0.2), "roles.actor=4 roles.rollout=4", 2.0),
        # Nothing can move.
        (Layout(1, 1), (1.0, 0.2), "roles.actor=2 with one more GPU", 2.0),
        (Layout(1, 2, tp=2), (0.3, 0.9), "roles.rollout=4 with 2 more GPUs", 1 / 0.45),
        # A small policy gains by another rollout alone.
        (Layout(1, 1, cores=4, is_small=True), (0.4, 1.0), "roles.rollout=2", 2.0),
    ],
)
def test_the_change_that_helps_most_is_named_with_its_gain(layout, busy, change, gain):
    found = advise(layout, *busy)
    assert found is not None
    assert (found.change, round(found.gain, 6)) == (change, round(gain, 6))
    assert found.idle == ("rollout" if busy[0] > busy[1] else "trainer")
    assert found.idle_share == 1 - min(busy)


@pytest.mark.parametrize(
    ("layout", "busy"),
    [
        (Layout(2, 2), (1.0, 0.6)),  # no role idles most of the time
        (Layout(2, 2), (0.4, 0.3)),  # both wait for something else
        (Layout(1, 1, cores=2, actor_threads=2), (1.0, 0.2)),  # both cores are busy
        (Layout(2, 1, cores=2), (0.95, 0.2)),
        (Layout(1, 1, cores=8, is_small=True), (1.0, 0.2)),  # a second thread would not help
        (Layout(1, 1, cores=2, is_small=True), (0.4, 1.0)),  # another rollout would have no core
        (Layout(1, 1, cores=1), (0.9, 0.2)),
    ],
)
def test_there_is_no_advice_where_nothing_would_help(layout, busy):
    assert advise(layout, *busy) is None


def test_a_run_is_advised_once_after_its_warm_up_and_at_its_end():
    balance = Balance(Layout(1, 1, cores=2))
    for _ in range(WARM_UP_STEPS):
        assert balance.step(100.0, 100.0, 0.0) == ""
    for number in range(1, TOLD_AFTER + 3):
        assert bool(balance.step(10.0, 0.0, 0.8)) is (number == TOLD_AFTER)
        assert bool(balance.advice()) is (number >= LEAST_STEPS)
    assert "the rollout idles 80% of the time: trainer.threads=2 rollout.threads=1" in balance.advice()
    assert "up to 1.7 times as fast (an estimate" in balance.advice()


def test_a_run_without_a_layout_or_without_reports_is_not_advised():
    silent, unknown = Balance(None), Balance(Layout(1, 1, cores=2))
    for _ in range(2 * TOLD_AFTER):
        assert silent.step(10.0, 0.0, 0.8) == unknown.step(10.0, 0.0, None) == ""
    assert silent.advice() == unknown.advice() == ""


def test_emulated_devices_roles_that_take_turns_and_several_hosts_are_not_advised(monkeypatch):
    monkeypatch.delenv(CORES, raising=False)
    assert layout_of(read_recipe(None)) is None
    monkeypatch.setenv(CORES, "16,12,4,0")
    assert layout_of(read_recipe(None, ["roles.rollout=2", "rollout.tp=2"])) == Layout(1, 2, 2, 16, 12, 4, False)
    for word in ("run.schedule=sync", "queue.max_staleness=0", "trainer.engine=emulated"):
        assert layout_of(read_recipe(None, [word])) is None
