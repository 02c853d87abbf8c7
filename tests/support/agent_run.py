"""A whole run in memory whose trajectories are those of agents."""

import json
from pathlib import Path
from typing import Any

from support.agent import AgentClient, Agents
from support.system import System

from headrace.rollout.serving.access import SERVE_FILE

TEXT = "/v1/completions"


class AgentRun(System):
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
