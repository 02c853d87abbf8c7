"""Samples of an evaluation in rollouts with real engines: they move, and their holder dies, without a change of a score."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.rollout_play import ManualRollout, Play

from headrace.comm.messages import RowId
from headrace.comm.recipe import EvalSettings
from headrace.relay.journal.replay import replay
from headrace.relay.queue.evaluation_prompts import EvaluationPrompts

NUM_PROMPTS = 2


class EvaluatedPlay(Play):
    """Two prompts with three samples each; rollout 0 gets all of them, and none of training."""

    def __init__(self, folder: Path, policy: Path) -> None:
        rows = [f'{{"prompt": "p{i}"}}'.encode() for i in range(NUM_PROMPTS)]
        prompts = EvaluationPrompts({"e": rows}, EvalSettings(path="e.jsonl", samples=3, temperature=1.0), num_steps=10)
        super().__init__(folder, policy, evaluation=prompts)

    def begin(self) -> ManualRollout:
        """Rollout 0, after some tokens of each sample."""
        first = self.rollouts[0]
        self.lease(first, NUM_PROMPTS)
        self.step(10)
        return first

    def scores(self) -> dict[RowId, float]:
        """The reward of each sample, a fingerprint of its tokens, once all have theirs."""
        log = self.hub.state.evaluations
        self.until(lambda: bool(log.results))
        assert (log.evaluated, log.failed, self.hub.state.account.leased) == (3 * NUM_PROMPTS, 0, 0)
        assert replay(self.path) == self.hub.state
        return {row_id: score.reward for row_id, score in log.scores.items()}


def move(play: EvaluatedPlay) -> None:
    """All samples go to rollout 1."""
    play.order(play.begin(), play.rollouts[1])
    play.until(lambda: list(play.hub.state.held) == ["rollout-1"])


def kill(play: EvaluatedPlay) -> None:
    """Rollout 1 gets the samples of a dead one, and continues them."""
    first, second, _ = play.rollouts
    play.begin()
    rows = {held.row_id for held in first.leases.held.values()}
    play.until_hub(lambda: rows <= play.hub.partials.rows.keys())
    play.kill(first)
    play.lease(second, NUM_PROMPTS)
    assert {held.row_id for held in second.leases.held.values() if held.num_kept} == rows


def update(play: EvaluatedPlay) -> None:
    """A newer version comes out while the samples are generated."""
    first = play.begin()
    first.generator.loaded.latest = 1
    play.step(5)
    assert first.generator.weights.version == 0


@pytest.mark.parametrize("disturb", [move, kill, update])
def test_a_disturbed_evaluation_has_the_scores_of_an_undisturbed_one(
    tmp_path: Path, llama: Path, disturb: Callable[[EvaluatedPlay], None]
):
    undisturbed = EvaluatedPlay(tmp_path / "undisturbed", llama)
    undisturbed.begin()
    expected = undisturbed.scores()
    disturbed = EvaluatedPlay(tmp_path / "disturbed", llama)
    disturb(disturbed)
    assert disturbed.scores() == expected
    assert len(set(expected.values())) > 1
