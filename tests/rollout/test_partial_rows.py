"""A dead rollout's trajectories continue elsewhere from their streamed tokens, as if they had never been interrupted."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.rollout_play import SAMPLES, STREAM_TOKENS, ManualRollout, Play

from headrace.comm.messages import RowId
from headrace.comm.messages.base import is_partial
from headrace.relay.journal import events as ev
from headrace.relay.journal.files import read_events
from headrace.rollout.leased_row import LeasedRow

Stage = Callable[..., Play]
Rows = dict[RowId, dict[str, np.ndarray]]


@pytest.fixture
def stage(tmp_path: Path, llama: Path) -> Stage:
    return lambda: Play(tmp_path / "play", llama)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Rows:
    """The rows of a rollout that nothing interrupts."""
    play = Play(tmp_path_factory.mktemp("unbroken") / "play", llama, ("here",))
    try:
        play.lease(play.rollouts[0])
        return rows_of(play)
    finally:
        play.close()


def rows_of(play: Play) -> Rows:
    """The bytes of every row at the end, without their versions."""
    play.finish()
    storage = play.rollouts[-1].fleet.open_rows(play.unit.address)
    ready = [event for _, event in read_events(play.path) if isinstance(event, ev.RowReady)]
    attempts = {event.row: play.hub.state.groups[event.row.group].rows[event.row.sample].attempt for event in ready}
    rows = {row: storage.get(row.key(attempt)) for row, attempt in attempts.items()}
    storage.close()
    of_weights = {"versions", "weight_digests"}
    return {row: {name: c for name, c in columns.items() if name not in of_weights} for row, columns in rows.items()}


def assert_same(rows: Rows, others: Rows) -> None:
    assert rows.keys() == others.keys()
    for row, columns in rows.items():
        for name, column in columns.items():
            assert np.array_equal(column, others[row][name]), f"{name} of {row}"


def num_kept(play: Play) -> dict[RowId, int]:
    return {event.row: event.num_kept for _, event in read_events(play.path) if isinstance(event, ev.RowReady)}


def kill_midway(play: Play, rollout: ManualRollout, num_steps: int = 25) -> dict[RowId, int]:
    """Kill a rollout some steps after its lease, once what it has streamed has arrived; its tokens at its death."""
    play.step(num_steps)
    held = rollout.leases.held
    parts = {held[part.trajectory_id].row_id: part for part in rollout.generator.responses()}
    tokens = {row: len(part.token_ids) for row, part in parts.items()}

    def has_arrived() -> bool:
        streamed = play.hub.partials.rows
        return all(row in streamed and num - streamed[row].num_tokens <= STREAM_TOKENS for row, num in tokens.items())

    play.until_hub(has_arrived)
    play.kill(rollout)
    return tokens


def test_a_dead_rollouts_trajectories_continue_and_few_of_their_tokens_are_generated_again(
    stage: Stage, unbroken: Rows
):
    play = stage()
    dead, other, _ = play.rollouts
    play.lease(dead)
    tokens = kill_midway(play, dead)
    play.lease(other)
    assert_same(rows_of(play), unbroken)
    kept = num_kept(play)
    assert len(kept) == SAMPLES and all(0 <= num - kept[row] <= STREAM_TOKENS for row, num in tokens.items())
    assert (play.hub.state.num_continued, play.hub.state.tokens_kept) == (SAMPLES, sum(kept.values()))


def test_a_trajectory_that_is_interrupted_twice_continues_from_the_second_holders_tokens(stage: Stage, unbroken: Rows):
    play = stage()
    first, second, third = play.rollouts
    play.lease(first)
    before = kill_midway(play, first, 12)
    play.lease(second)
    tokens = kill_midway(play, second, 12)
    assert all(tokens[row] > before[row] for row in tokens)
    play.lease(third)
    assert_same(rows_of(play), unbroken)
    assert all(tokens[row] - num <= STREAM_TOKENS for row, num in num_kept(play).items())


def test_an_idle_rollout_takes_the_older_version_of_a_begun_trajectory_and_returns_to_the_newest(
    stage: Stage, unbroken: Rows
):
    play = stage()
    dead, other, _ = play.rollouts
    play.lease(dead)
    kill_midway(play, dead)
    other.generator.loaded.latest = 1
    play.step()
    assert other.generator.weights.version == 1
    play.lease(other)
    assert other.generator.weights.version == 0
    assert_same(rows_of(play), unbroken)
    assert play.hub.state.num_continued == SAMPLES
    play.step()
    assert other.generator.weights.version == 1
    assert {row.version for group in play.hub.state.groups.values() for row in group.rows} == {0}


def test_a_busy_rollout_of_another_version_leaves_a_begun_trajectory_to_an_idle_one(stage: Stage):
    play = stage()
    dead, busy, idle = play.rollouts
    play.lease(dead)
    busy.generator.loaded.latest = idle.generator.loaded.latest = 1
    play.lease(busy)
    kill_midway(play, dead, 12)
    busy.max_running = 3 * SAMPLES
    play.step(5)
    busy.max_running = 0
    assert {held.version for held in busy.leases.held.values()} == {1}
    play.lease(idle)
    assert {held.version for held in idle.leases.held.values()} == {0}
    play.finish()
    assert play.hub.state.num_continued == SAMPLES


def test_a_begun_trajectory_whose_version_is_gone_starts_again_and_is_counted(stage: Stage, unbroken: Rows):
    play = stage()
    dead, other, _ = play.rollouts
    play.lease(dead)
    kill_midway(play, dead)
    other.generator.loaded.latest = other.generator.loaded.oldest = 1
    play.lease(other)
    assert other.generator.weights.version == 1
    assert_same(rows_of(play), unbroken)
    assert (play.hub.state.num_continued, play.hub.partials.num_restarted) == (0, SAMPLES)
    assert {row.version for group in play.hub.state.groups.values() for row in group.rows} == {1}


def test_a_begun_trajectory_whose_only_unit_is_lost_starts_again(stage: Stage, unbroken: Rows):
    play = stage()
    dead, other, _ = play.rollouts
    play.lease(dead)
    kill_midway(play, dead)
    play.unit.drop(list(play.unit.listing()))
    play.lease(other)
    assert_same(rows_of(play), unbroken)
    assert set(num_kept(play).values()) == {0}


def test_a_begun_trajectory_of_another_version_than_the_hub_knows_starts_again(stage: Stage, unbroken: Rows):
    """A writer that counted as dead has replaced the first tokens of one trajectory by those of a later version."""
    play = stage()
    dead, other, _ = play.rollouts
    play.lease(dead)
    kill_midway(play, dead)
    storage = other.fleet.open_rows(play.unit.address)
    (replaced, *_) = sorted(key for key in play.unit.listing() if is_partial(key))
    columns = storage.get(replaced)
    storage.put_many({replaced: columns | {"versions": np.full_like(columns["versions"], 1)}})
    storage.close()
    play.lease(other)
    assert_same(rows_of(play), unbroken)
    kept = num_kept(play)
    assert [row.partial_key(1) for row, num in kept.items() if not num] == [replaced]
    ready = [event for _, event in read_events(play.path) if isinstance(event, ev.RowReady)]
    assert {event.num_versions for event in ready} == {1}


def test_streamed_tokens_leave_the_units_when_their_trajectories_end(stage: Stage):
    play = stage()
    dead, other, _ = play.rollouts
    relay = play.network.mailboxes.open("relay-0")
    play.lease(dead)
    kill_midway(play, dead)
    assert sum(is_partial(key) for key in play.unit.listing()) == SAMPLES
    play.lease(other)
    play.finish()

    def are_dropped() -> bool:
        play.hub.advance()
        while (envelope := relay.receive(0)) is not None:
            play.unit.drop(envelope.message.keys)  # pyright: ignore[reportAttributeAccessIssue]
        return not any(is_partial(key) for key in play.unit.listing())

    play.until(are_dropped)
    assert not play.hub.partials.rows and len(play.unit.listing()) == SAMPLES


def test_a_continued_response_names_the_version_of_each_of_its_tokens():
    held = LeasedRow(RowId(0, 1, 2), 1, version=7, row={})
    held.keep(10, [4, 4, 5, 5, 5])
    assert held.first_versions(10, 8).tolist() == [4, 4, 5, 5, 5, 7, 7, 7] and held.num_kept == 5
    alone = LeasedRow(RowId(0, 1, 2), 1, version=4, row={})
    alone.keep(10, [4, 4])
    assert alone.first_versions(10, 3).tolist() == [4, 4, 4] and not alone.switches
