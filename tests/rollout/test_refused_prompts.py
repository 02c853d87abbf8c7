"""Prompts and observations that cannot become tokens cost their trajectories; a template that accepts none ends the run."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.rollout_play import SAMPLES, Play

from headrace.comm.errors import UnusablePrompt
from headrace.comm.recipe import EnvironmentSettings
from headrace.relay.journal.records import RowStatus
from headrace.rollout import episodes
from headrace.rollout.environments.base import StepResult
from headrace.rollout.environments.pool import EnvironmentCall
from headrace.rollout.user_code.host import PATIENCE


class Echo:
    """Environments in memory: every turn is answered by a letter."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self.calls: list[EnvironmentCall] = []

    def start(self) -> None: ...

    def submit(self, call: EnvironmentCall) -> None:
        call.step = StepResult("x" if call.episode.completions else "")
        self.calls.append(call)

    def finished(self) -> list[EnvironmentCall]:
        calls, self.calls = self.calls, []
        return calls

    def drop(self, number: int) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def stage(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Play]:
    monkeypatch.setattr(episodes, "EnvironmentPool", Echo)
    turns = ("environment.path=an.py:Echo", "environment.max_turns=2", "sampling.stop=[a,b,c,d,e,f,g,h,i,j,k,l,m,n,o]")
    return lambda *settings: Play(tmp_path / "play", llama, ("here",), settings=settings or turns)


class Refusal:
    """A template that refuses what it is given, but for the first `num_accepted` times."""

    def __init__(self, accepted: Callable[..., list[int]], num_accepted: int = 0) -> None:
        self.accepted, self.num_accepted = accepted, num_accepted

    def __call__(self, *given: object) -> list[int]:
        self.num_accepted -= 1
        if self.num_accepted >= 0:
            return self.accepted(*given)
        raise UnusablePrompt("data.chat_template: the template rejects a prompt")


def ends(play: Play) -> list[RowStatus]:
    return [row.status for group in play.hub.state.groups.values() for row in group.rows]


def test_a_template_that_refuses_every_prompt_of_an_environment_ends_the_run(stage: Callable[..., Play]):
    play = stage()
    (rollout,) = play.rollouts
    rollout.generator.prompt_ids = Refusal(rollout.generator.prompt_ids)  # pyright: ignore[reportAttributeAccessIssue]
    rollout.max_running = SAMPLES
    with pytest.raises(UnusablePrompt, match=r"data\.chat_template"):
        play.step(100)
    assert play.hub.state.account.failed == SAMPLES * (PATIENCE - 1)


def test_a_template_that_has_accepted_a_prompt_may_refuse_any_number_of_others(stage: Callable[..., Play]):
    play = stage()
    (rollout,) = play.rollouts
    rollout.generator.prompt_ids = Refusal(rollout.generator.prompt_ids, num_accepted=1)  # pyright: ignore[reportAttributeAccessIssue]
    rollout.max_running = 2 * SAMPLES
    play.until(lambda: play.hub.state.account.failed > SAMPLES * PATIENCE)


def test_an_observation_that_the_template_refuses_costs_its_trajectory_alone(stage: Callable[..., Play]):
    play = stage()
    (rollout,) = play.rollouts
    rollout.generator.observation_ids = Refusal(rollout.generator.observation_ids, num_accepted=1)  # pyright: ignore[reportAttributeAccessIssue]
    play.lease(rollout)
    play.finish()
    assert RowStatus.READY in ends(play) and RowStatus.FAILED in ends(play)


def test_a_template_that_refuses_every_observation_ends_the_run(stage: Callable[..., Play]):
    play = stage()
    (rollout,) = play.rollouts
    rollout.generator.observation_ids = Refusal(rollout.generator.observation_ids)  # pyright: ignore[reportAttributeAccessIssue]
    rollout.max_running = 2 * SAMPLES
    with pytest.raises(UnusablePrompt, match=r"data\.chat_template"):
        play.step(1000)


def test_a_prompt_without_tokens_is_dropped(stage: Callable[..., Play]):
    play = stage("data.too_long=drop")
    (rollout,) = play.rollouts
    rollout.generator.prompt_ids = lambda row: []
    rollout.max_running = SAMPLES
    play.until(lambda: bool(play.hub.state.dropped))
    assert play.hub.state.dropped[0] == "prompt 0 has no tokens"
