"""New weights by the hub's order, in the middle of trajectories: nothing is lost, and each token is counted under its version."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.rollout_play import SAMPLES, ManualRollout, Play

from headrace.comm.mailbox import Envelope
from headrace.comm.messages import GroupId, LoadReport
from headrace.comm.messages.weights import SwitchWeights
from headrace.relay.journal import events as ev
from headrace.relay.journal.files import read_events
from headrace.relay.journal.replay import replay
from headrace.rollout.leased_row import LeasedRow

Stage = Callable[..., Play]


@pytest.fixture
def stage(tmp_path: Path, llama: Path) -> Stage:
    return lambda **settings: Play(tmp_path / "play", llama, **settings)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> list[float]:
    """The rewards of a rollout that nothing interrupts: a fingerprint of its tokens."""
    play = Play(tmp_path_factory.mktemp("unbroken") / "play", llama, ("here",))
    play.lease(play.rollouts[0])
    return list(play.finish().values())


def order(rollout: ManualRollout, version: int = 0) -> int:
    """Order new weights; returns the version of the rollout then."""
    rollout.handle(Envelope("hub", SwitchWeights(version)))
    return rollout.generator.weights.version


def rows(play: Play) -> list[ev.RowReady]:
    return [event for _, event in read_events(play.path) if isinstance(event, ev.RowReady)]


def test_unfinished_trajectories_go_on_under_the_weights_that_the_hub_orders(stage: Stage, unbroken: list[float]):
    play = stage()
    rollout = play.rollouts[0]
    play.lease(rollout)
    play.step(10)
    assert order(rollout) == 0, "there is no newer version"
    rollout.generator.loaded.latest = 2
    assert order(rollout, version=1) == 0, "an order for another version"
    play.step()
    assert rollout.generator.weights.version == 0, "without an order it drains"
    assert [order(rollout), order(rollout)] == [2, 2]
    assert list(play.finish().values()) == unbroken
    assert [(row.version, row.num_versions) for row in rows(play)] == [(0, 2)] * SAMPLES
    assert play.hub.state.midway == {"starved": 1} == replay(play.path).midway


def test_an_order_has_no_effect_while_trajectories_move(stage: Stage):
    play = stage()
    source, target, _ = play.rollouts
    play.lease(source)
    play.step(5)
    for rollout in (source, target):
        rollout.generator.loaded.latest = 1
    target.loses.add(SwitchWeights)
    play.order(source, target)
    assert source.migration.is_under_way and order(source) == 0
    play.finish()
    assert {row.num_versions for row in rows(play)} == {1}


def test_an_order_has_no_effect_while_an_evaluation_needs_the_version(stage: Stage):
    play = stage()
    rollout = play.rollouts[0]
    play.lease(rollout)
    rollout.generator.loaded.latest = 1
    rollout.leases._evaluates = True  # pyright: ignore[reportPrivateUsage]
    assert order(rollout) == 0
    rollout.leases._evaluates = False  # pyright: ignore[reportPrivateUsage]
    assert order(rollout) == 1


def test_a_report_has_what_the_hub_decides_by(stage: Stage):
    play = stage()
    rollout = play.rollouts[0]
    play.lease(rollout)
    play.step(3)

    def report() -> LoadReport:
        return rollout._totals.report(rollout.generator, rollout.migration, 0, num_starting=2)  # pyright: ignore[reportPrivateUsage]

    load = report()
    assert (load.num_running, load.peak_running, load.num_at_tools, load.num_unfinished) == (3, 3, 2, 5)
    rollout.generator.loaded.latest = 1
    order(rollout)
    assert report().peak_running == 0, "the peak is that of the present version"


def test_what_a_dead_rollout_began_on_two_versions_continues_on_the_second_one(stage: Stage, unbroken: list[float]):
    play = stage()
    dead, other, _ = play.rollouts
    play.lease(dead)
    play.step(10)
    dead.generator.loaded.latest = 1
    order(dead)
    play.step(10)

    def has_arrived() -> bool:
        streamed = play.hub.partials.rows.values()
        return len(streamed) == SAMPLES and all(row.newest == 1 for row in streamed)

    play.until_hub(has_arrived)
    play.kill(dead)
    other.generator.loaded.latest = 2
    play.step()
    play.lease(other)
    assert other.generator.weights.version == 1
    assert list(play.finish().values()) == unbroken
    assert [(row.version, row.num_versions) for row in rows(play)] == [(0, 2)] * SAMPLES
    assert play.hub.state.num_continued == SAMPLES


def was_leased_again(play: Play, rollout: ManualRollout, before: list[LeasedRow]) -> bool:
    """Whether a rollout has the present attempts of rows that it held; it may have another group too."""
    rows = {row.row_id: play.hub.state.row(row.row_id) for row in before}
    held = {row.row_id: row.attempt for row in rollout.leases.held.values()}
    return all(row is not None and 1 < row.attempt == held.get(row_id) for row_id, row in rows.items())


def returns(play: Play) -> list[GroupId]:
    """The groups that rollouts gave back."""
    events = [event for _, event in read_events(play.path)]
    return [event.group for event in events if isinstance(event, ev.Returned) and "switched" in event.reason]


def test_a_trajectory_that_was_dropped_as_its_turn_ended_takes_no_new_weights(stage: Stage):
    play = stage()
    rollout = play.rollouts[0]
    play.lease(rollout)
    play.step(5)
    del rollout.leases.held[next(iter(rollout.leases.held))]  # the generator has it until its next step
    rollout.generator.loaded.latest = 1
    assert order(rollout) == 1
    play.until_hub(lambda: bool(play.hub.state.midway))
    received = [event for _, event in read_events(play.path) if isinstance(event, ev.Received)]
    assert received[-1].num_unfinished == SAMPLES - 1


def test_a_rollout_wrongly_taken_for_dead_goes_on_under_newer_weights_than_the_hub_knows_of(
    stage: Stage, unbroken: list[float]
):
    play = stage()
    rollout, dead, other = play.rollouts
    play.lease(rollout)
    play.lease(dead)
    play.step(10)
    play.until_hub(lambda: len(play.hub.partials.rows) == 2 * SAMPLES)
    play.kill(dead)
    rollout.generator.loaded.latest = 1
    order(rollout)
    before = list(rollout.leases.held.values())
    play.hub.on_process_death(rollout.name, "silent")
    assert {row.newest for row in play.hub.partials.rows.values()} == {0}
    rollout.max_running = 3 * SAMPLES
    play.until(lambda: was_leased_again(play, rollout, before))
    rollout.max_running = 0
    assert [rollout.leases.held[row.row_id.number] is row for row in before] == [True] * SAMPLES
    play.until(lambda: bool(returns(play)))
    play.lease(other)
    rewards = play.finish()
    assert [rewards[row.row_id] for row in before] == unbroken
    ends = {row.row: (row.version, row.num_versions) for row in rows(play)}
    assert [ends[row.row_id] for row in before] == [(0, 2)] * SAMPLES
    assert len(returns(play)) == 1 and returns(play)[0] != before[0].row_id.group, "that of the dead one alone"


def test_a_rollout_wrongly_taken_for_dead_gives_back_only_the_group_that_is_too_old(stage: Stage):
    play = stage(settings=("rollout.stream_tokens=0",))
    rollout = play.rollouts[0]
    play.lease(rollout)
    play.step(5)
    rollout.generator.loaded.latest = 1
    order(rollout)
    old = list(rollout.leases.held.values())
    rollout.max_running = 2 * SAMPLES
    play.until(lambda: len(rollout.leases.held) == 2 * SAMPLES)
    young = [row for row in rollout.leases.held.values() if row not in old]
    play.hub.on_process_death(rollout.name, "silent")
    rollout.max_running = 4 * SAMPLES
    play.until(lambda: was_leased_again(play, rollout, old + young))
    rollout.max_running = 0
    held = rollout.leases.held
    assert [held[row.row_id.number] is row for row in old + young] == [False] * SAMPLES + [True] * SAMPLES
    assert returns(play) == [old[0].row_id.group]
    play.finish()


NO_STREAM = "rollout.stream_tokens=0"


@pytest.mark.parametrize(
    ("settings", "keeps"),
    [
        ((), True),
        ((NO_STREAM,), False),
        ((NO_STREAM, "rollout.max_age=9"), True),
        ((NO_STREAM, "rollout.max_age=9", "queue.max_staleness=8"), False),
    ],
)
def test_a_rollout_wrongly_taken_for_dead_keeps_its_mixed_trajectories_if_the_hub_knows_their_age_or_it_does_not_matter(
    stage: Stage, unbroken: list[float], settings: tuple[str, ...], keeps: bool
):
    play = stage(settings=settings)
    rollout = play.rollouts[0]
    play.lease(rollout)
    play.step(10)
    rollout.generator.loaded.latest = 1
    order(rollout)
    play.step(10)
    if not settings:
        play.until_hub(lambda: {row.newest for row in play.hub.partials.rows.values()} == {1})
    before = list(rollout.leases.held.values())
    play.hub.on_process_death(rollout.name, "silent")
    rollout.max_running = 2 * SAMPLES
    play.until(lambda: was_leased_again(play, rollout, before))
    rollout.max_running = 0
    held = rollout.leases.held
    assert [held[row.row_id.number] is row for row in before] == [keeps] * SAMPLES
    rewards = play.finish()
    assert [rewards[row.row_id] for row in before] == unbroken
    expected = (0, 2) if keeps else (1, 1)
    ends = {row.row: (row.version, row.num_versions) for row in rows(play)}
    assert [ends[row.row_id] for row in before] == [expected] * SAMPLES
