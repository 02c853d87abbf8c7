"""Turns, while rollouts die, trajectories move, and environments take their time."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.rollout_play import SAMPLES, ManualRollout, Play

from headrace.comm.messages import RowId
from headrace.relay.journal import events as ev
from headrace.relay.journal.files import read_events
from headrace.relay.journal.state import RowStatus

ENVIRONMENT = '''
"""Counts turns; while the file `hold` is there, the third turn has no answer, and with `hold reset` no reset."""

import asyncio
from pathlib import Path

class Counter:
    async def reset(self, prompt, **row):
        self.turns = []
        while Path(__file__).with_name("hold reset").exists():
            await asyncio.sleep(0.01)

    async def step(self, completion):
        self.turns.append(completion)
        while len(self.turns) == 3 and Path(__file__).with_name("hold").exists():
            await asyncio.sleep(0.01)
        return f"[{sum(map(len, self.turns))}]", len(completion), False
'''
Stage = Callable[..., Play]
Rows = dict[RowId, dict[str, np.ndarray]]


def stage_in(folder: Path, policy: Path) -> Stage:
    file = folder / "environment.py"
    file.write_text(ENVIRONMENT)
    words = (
        f"environment.path={file}:Counter", "sampling.stop=[a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q,r,s]",
        "rollout.stream_tokens=256",
    )  # fmt: skip
    return lambda name, *more: Play(folder / name, policy, settings=(*words, *more))


@pytest.fixture
def stage(tmp_path: Path, llama: Path) -> Stage:
    return stage_in(tmp_path, llama)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Rows:
    """The rows of a rollout that nothing interrupts."""
    play = stage_in(tmp_path_factory.mktemp("unbroken"), llama)("play")
    try:
        play.lease(play.rollouts[0])
        return rows_of(play)
    finally:
        play.close()


def rows_of(play: Play) -> Rows:
    """The rows of the first prompt at the end, without their versions. A rollout whose trajectories wait leases others."""
    play.finish()
    storage = play.rollouts[-1].fleet.open_rows(play.unit.address)
    ready = [event for _, event in read_events(play.path) if isinstance(event, ev.RowReady)]
    attempts = {event.row: play.hub.state.groups[event.row.group].rows[event.row.sample].attempt for event in ready}
    rows = {row: storage.get(row.key(attempt)) for row, attempt in attempts.items()}
    storage.close()
    return {
        row: {name: c for name, c in columns.items() if name != "versions"}
        for row, columns in rows.items()
        if not row.prompt
    }


def assert_same(rows: Rows, unbroken: Rows) -> None:
    assert rows.keys() == unbroken.keys() and len(rows) == SAMPLES
    for row, columns in unbroken.items():
        for name, column in columns.items():
            if name == "reward_info":  # it has the seconds of the tools
                continue
            assert np.array_equal(column, rows[row][name]), f"{name} of {row}"


def until_third_turn_ends(play: Play, rollout: ManualRollout) -> None:
    play.until(lambda: all(len(h.episode.completions) == 3 for h in rollout.leases.held.values() if h.episode))


def test_a_rollout_killed_between_turns_loses_at_most_one_turn_of_each_trajectory(
    stage: Stage, unbroken: Rows, tmp_path: Path
):
    (tmp_path / "hold").touch()
    play = stage("broken")
    dead, other, _ = play.rollouts
    play.lease(dead)
    until_third_turn_ends(play, dead)
    starts = {held.row_id: held.episode.turn_start for held in dead.leases.held.values() if held.episode}

    def has_arrived() -> bool:
        streamed = play.hub.partials.rows
        return all(row in streamed and streamed[row].num_tokens >= start for row, start in starts.items())

    play.until_hub(has_arrived)
    play.kill(dead)
    (tmp_path / "hold").unlink()
    play.lease(other)
    assert_same(rows_of(play), unbroken)
    kept = {event.row: event.num_kept for _, event in read_events(play.path) if isinstance(event, ev.RowReady)}
    assert len(starts) > 1 and all(kept[row] >= start > 0 for row, start in starts.items())


def test_trajectories_that_wait_for_their_environments_move_and_wait_elsewhere(
    stage: Stage, unbroken: Rows, tmp_path: Path
):
    (tmp_path / "hold").touch()
    play = stage("moved")
    source, target, _ = play.rollouts
    play.lease(source)
    until_third_turn_ends(play, source)
    play.order(source, target)
    play.until(lambda: len(target.leases.held) > 1 and not source.leases.held)
    assert target.generator.num_running == 0, "they wait here too"
    (tmp_path / "hold").unlink()
    assert_same(rows_of(play), unbroken)


def test_a_hung_environment_costs_the_trajectories_that_ask_it_and_no_others(stage: Stage, tmp_path: Path):
    (tmp_path / "hold").touch()
    for turns, is_failed in ((2, False), (3, True)):
        play = stage(f"{turns} turns", "environment.timeout_s=2", f"environment.max_turns={turns}")
        play.lease(play.rollouts[0])
        play.finish()
        ends = [row.status for group in play.hub.state.groups.values() for row in group.rows]
        num_failed = ends.count(RowStatus.FAILED)
        assert (0 < num_failed < len(ends)) if is_failed else not num_failed, "one has no third turn: it is long"
        play.close()


def test_the_version_that_comes_out_during_a_reset_is_that_of_all_tokens(stage: Stage, tmp_path: Path):
    (tmp_path / "hold reset").touch()
    play = stage("partial", "run.schedule=partial")
    rollout = play.rollouts[0]
    rollout.max_running = SAMPLES
    play.until(lambda: len(rollout.leases.held) == SAMPLES)
    rollout.max_running = 0
    rollout.generator.loaded.latest = 1
    play.until(lambda: rollout.generator.weights.version == 1)
    (tmp_path / "hold reset").unlink()
    play.finish()
    storage = rollout.fleet.open_rows(play.unit.address)
    rows = [event for _, event in read_events(play.path) if isinstance(event, ev.RowReady)]
    versions = [storage.get(event.row.key(1))["versions"] for event in rows]
    storage.close()
    assert len(rows) == SAMPLES and {event.version for event in rows} == {1}
    assert all(len(column) > 0 and (column == 1).all() for column in versions)
