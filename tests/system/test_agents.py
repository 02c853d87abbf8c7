"""Whole runs in memory whose trajectories are those of agents, which use the run over HTTP."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.agent import AgentClient, Agents
from support.system import System

pytest.importorskip("uvicorn")
from headrace.relay.journal.events import RowReady
from headrace.rollout.serving import run_front
from headrace.rollout.serving.access import SERVE_FILE

TEXT = "/v1/completions"


class Served(System):
    """A run with a front and agents."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        words = {"rollout.serve": "0", "environment.path": "serve", "reward.path": "", "run.steps": 4}
        super().__init__(folder, **words | settings)

    def agents(self, play: Any, number: int = 3) -> Agents:
        """Agents, once the front has told its address."""
        file = self.dir / SERVE_FILE
        self.until(file.exists)
        url = json.loads(file.read_text())["url"]
        return Agents(AgentClient(int(url.rpartition(":")[2])), play).start(number)


def two_turns(client: AgentClient, claimed: Any) -> dict[str, Any]:
    """A turn, an answer to it, and another turn; the reward is the share of the letter a."""
    prompt = claimed["row"]["prompt"]
    body = {"model": claimed["model"], "max_tokens": 3}
    first = client.call(claimed, TEXT, {**body, "prompt": prompt, "return_token_ids": True})
    assert first.status == 200, first.body
    (choice,) = first.body["choices"]
    tokens = [*choice["prompt_token_ids"], *choice["token_ids"]]
    second = client.call(claimed, TEXT, {**body, "prompt": [*tokens, 5, 6]})
    assert second.status == 200, second.body
    text = choice["text"] + second.body["choices"][0]["text"]
    return {"reward": text.count("a") / 6}


def run_with(system: Served, play: Any, num_rollouts: int = 2) -> tuple[dict[str, Any], Agents]:
    system.start_all(num_rollouts)
    system.start("front", run_front.run)
    agents = system.agents(play)
    summary = system.wait()
    agents.stop()
    assert not agents.problems, agents.problems
    return summary, agents


@pytest.mark.parametrize("schedule", ["headrace", "sync"])
def test_agents_train_a_run_and_every_row_is_accounted_for(tmp_path: Path, schedule: str):
    system = Served(tmp_path, **{"run.schedule": schedule, "run.save_rows": "all", "sampling.max_new_tokens": 20})
    summary, agents = run_with(system, two_turns)
    assert summary["status"] == "finished" and summary["steps"] == 4
    assert summary["accounting"]["holds"] and summary["tokens"]["holds"]
    assert len(agents.ended) >= 16
    ready = [event for event in system.events() if isinstance(event, RowReady)]
    assert len(ready) >= 16 and all(event.num_drawn <= 6 for event in ready)
    metrics = [json.loads(line) for line in (system.dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["turns/mean"] for line in metrics if "turns/mean" in line] == [2.0] * 4
