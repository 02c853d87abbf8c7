"""A rollout whose reward functions are slower than its generator."""

from pathlib import Path

import pytest
from support.rollout_play import SAMPLES, Play


@pytest.fixture
def play(tmp_path: Path, llama: Path) -> Play:
    return Play(tmp_path / "play", llama, ("here",))


def test_a_rollout_asks_for_no_prompts_while_its_rewards_are_behind(play: Play):
    rollout = play.rollouts[0]
    rollout.rewards.backlog = 2 * SAMPLES
    rollout.max_running = 2 * SAMPLES
    play.step(20)
    assert not rollout.leases.held
    rollout.rewards.backlog = SAMPLES
    play.until(lambda: bool(rollout.leases.held))
    rollout.max_running = 0
    assert len(play.hub.state.groups) == 1, "half of its places are free"
    assert len(play.finish()) == SAMPLES
