"""Whole runs in memory whose trajectories are those of agents, which use the run over HTTP."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.agent import AgentClient, Agents
from support.agent_run import AgentRun, two_turns

pytest.importorskip("uvicorn")
from headrace.relay.journal.events import Returned, RowFailed, RowReady
from headrace.rollout.serving import run_front
from headrace.rollout.serving.access import SERVE_FILE
from headrace.rollout.serving.run_front import RunFront
from headrace.trainer import reference_loop
from headrace.trainer.replay.replay import replay_steps
from headrace.trainer.step_log import StepReplay


def run_with(system: AgentRun, play: Any, num_rollouts: int = 2) -> tuple[dict[str, Any], Agents]:
    system.start_all(num_rollouts)
    system.start("front", run_front.run)
    agents = system.agents(play)
    summary = system.wait()
    agents.stop()
    assert not agents.problems, agents.problems
    return summary, agents


@pytest.mark.parametrize(
    "settings",
    [{}, {"run.schedule": "sync"}, {"run.schedule": "partial"}, {"queue.max_staleness": 1}, {"rollout.max_age": 1}],
    ids=str,
)
def test_agents_train_a_run_and_every_row_is_accounted_for(tmp_path: Path, settings: dict[str, Any]):
    system = AgentRun(tmp_path, **{"run.save_rows": "all", "sampling.max_new_tokens": 20} | settings)
    summary, agents = run_with(system, two_turns)
    assert summary["status"] == "finished" and summary["steps"] == 4
    assert summary["accounting"]["holds"] and summary["tokens"]["holds"]
    assert len(agents.ended) >= 16
    ready = [event for event in system.events() if isinstance(event, RowReady)]
    assert len(ready) >= 16 and all(event.num_drawn <= 6 for event in ready)
    metrics = [json.loads(line) for line in (system.dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["turns/mean"] for line in metrics if "turns/mean" in line] == [2.0] * 4


def branching(client: AgentClient, claimed: Any) -> dict[str, Any]:
    """Two branches behind a shared turn, and a third one of its own; the reward is the sample's number."""
    calls = [[5, 6, 7, 8]]
    for number in range(4):
        prompt = calls[number] if number < len(calls) else calls[-1]
        body = {"token_ids": prompt, "sampling_params": {"max_tokens": 3, "ignore_eos": True}}
        reply = client.call(claimed, "/inference/v1/generate", body)
        assert reply.status == 200, reply.body
        if not number:
            drawn = [*prompt, *reply.body["choices"][0]["token_ids"]]
            calls += [[*drawn, 9], [*drawn, 10, 11], [20, 21]]
    return {"reward": float(claimed["sample"])}


def test_branches_are_trained_with_the_advantage_of_their_conversation(tmp_path: Path):
    """A replay repeats the steps bit for bit, from rows that keep their branches."""
    settings = {"run.save_rows": "all", "sampling.max_new_tokens": 20, "trainer.prefix_tree": "true"}
    system = AgentRun(tmp_path, **settings)
    summary, _ = run_with(system, branching)
    assert summary["accounting"]["holds"] and summary["tokens"]["holds"]
    assert summary["tokens"]["trained"] == 4 * 2 * 2 * 12, "each drawn token once"
    for step in range(4):
        for batch in StepReplay(system.dir, step).batches():
            for row in batch.rows:
                columns = batch.columns[row.key]
                tokens = [*columns["prompt_ids"], *columns["response_ids"]]
                parts = np.split(np.array(tokens), columns["branch_starts"])
                assert [len(part) for part in parts] == [11, 12, 5]
                assert parts[0][:7].tolist() == parts[1][:7].tolist() and parts[0][7] == 9 and parts[1][7] == 10
                assert columns["loss_mask"].sum() == 12
                assert row.reward == row.row.sample
    assert replay_steps(system.recipe) == 0


def hangs_and_breaks(client: AgentClient, claimed: Any) -> dict[str, Any]:
    """Of each group one agent never ends, one breaks, and two end as they should."""
    if claimed["sample"] == 1:
        return {"failure": "the tool broke"}
    outcome = two_turns(client, claimed)
    return {} if claimed["sample"] == 2 else outcome


def test_agents_that_fail_cost_their_own_samples_alone(tmp_path: Path):
    settings = {"environment.timeout_s": 0.5, "batch.samples_per_prompt": 4, "sampling.max_new_tokens": 20}
    system = AgentRun(tmp_path, **settings)
    summary, _ = run_with(system, hangs_and_breaks)
    assert summary["steps"] == 4 and summary["accounting"]["holds"] and summary["tokens"]["holds"]
    failed = {event.reason: event for event in system.events() if isinstance(event, RowFailed)}
    silence = "the agent said nothing for 0.5 s (environment.timeout_s)"
    assert {*failed} == {"the agent: the tool broke", silence}
    assert failed[silence].num_drawn > 0, "its tokens are in the account"
    ready = {event.row.sample for event in system.events() if isinstance(event, RowReady)}
    assert ready == {0, 3}
    metrics = [json.loads(line) for line in (system.dir / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("environment/timeouts", 0) for line in metrics) >= 4
    assert sum(line.get("environment/errors", 0) for line in metrics) >= 4


class FrontDied(Exception):
    """The end of a front in the middle of its work."""


def test_a_front_that_dies_gives_its_samples_to_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Conversations are lost with it, rows that it has written are not, and no sample is lost or trained twice."""
    system = AgentRun(tmp_path, **{"sampling.max_new_tokens": 20, "run.steps": 6})
    system.start_all(2)
    fleet = system.start("front", dying_front)
    agents = system.agents(two_turns)
    system.until(lambda: not fleet.me.is_alive or not system.network.members["front-0"].is_alive)
    agents.stop()
    (system.dir / SERVE_FILE).unlink(missing_ok=True)
    system.start("front", run_front.run)
    second = system.agents(two_turns)
    summary = system.wait()
    second.stop()
    assert summary["steps"] == 6 and summary["accounting"]["holds"] and summary["tokens"]["holds"]
    assert agents.ended and second.ended
    assert any(isinstance(event, Returned) and "incarnation 1" in event.reason for event in system.events())


def dying_front(fleet: Any, recipe: Any) -> None:
    """A front that is killed with conversations open."""
    front = RunFront(fleet, recipe)
    office = front._agents._office  # pyright: ignore[reportOptionalMemberAccess]
    turn = front.desk.turn

    def turn_or_die(wait_s: float) -> None:
        turn(wait_s)
        ended = sum(bool(each.outcome) for each in office._known.values())
        if ended >= 6 and office._num_open:
            raise FrontDied

    front.desk.turn = turn_or_die  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(FrontDied):
        front.run()
    front.http.close()
    samples = front._agents.samples  # pyright: ignore[reportOptionalMemberAccess]
    samples._scoring.close()
    samples._row_writer.close()
    fleet.mailboxes.close_inbox(fleet.name)
    fleet.crash()
    fleet.leave = lambda: None


def test_reward_functions_add_theirs_and_the_reference_computes_branches_alone(tmp_path: Path):
    """Before the first step the reference is the policy, so that the log-probs of its branches are those of the rollouts."""
    words = {"reward.path": f"{tmp_path / 'rewards.py'}:reward", "algorithm.kl_coef": 0.1, "roles.reference": 1}
    system = AgentRun(tmp_path, **words | {"run.save_rows": "all", "sampling.max_new_tokens": 20, "run.steps": 2})
    system.start("reference", reference_loop.run)
    summary, _ = run_with(system, lambda client, claimed: {"reward": branching(client, claimed)["reward"] + 10})
    assert summary["accounting"]["holds"] and summary["tokens"]["holds"]
    for batch in StepReplay(system.dir, 0).batches():
        for row in batch.rows:
            columns = batch.columns[row.key]
            assert 10 + row.row.sample <= row.reward <= 11 + row.row.sample
            mask = columns["loss_mask"] == 1
            np.testing.assert_allclose(columns["ref_logprobs"][mask], columns["rollout_logprobs"][mask], atol=1e-4)
