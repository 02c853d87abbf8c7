"""Greedy answers to held-out prompts by several folders of weights: the one evaluation of all sides of a comparison.

    python -m bench.held_out RECIPE WEIGHTS...

RECIPE is a run's `config.yaml` whose `data.path` is the held-out file. Each folder gives one line of JSON: the mean of each
reward function over the prompts.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from headrace.comm.plugins import load_object
from headrace.comm.recipe import Recipe
from headrace.launch.config.load import read_recipe
from headrace.relay.dataset.opening import open_rows
from headrace.rollout import Engine, SamplingParams
from headrace.rollout.engine.chat_template import prompt_tokens, text_tokens
from headrace.rollout.environments.tools import ToolEnvironment
from headrace.rollout.rewards.worker import load_functions
from headrace.trainer.policy.model import load_tokenizer

_RUNNING = 64


class Answer:
    """A response under way to one row: its tokens, and its tools if the recipe has any."""

    def __init__(self, row: dict[str, Any], prompt_ids: list[int], environment: ToolEnvironment | None) -> None:
        self.row, self.prompt_ids, self.environment = row, prompt_ids, environment
        self.token_ids: list[int] = []
        self.num_turns, self.is_done = 0, False

    async def take(self, token_ids: list[int], text: str, recipe: Recipe, tokenizer: Any) -> None:
        """Add a turn, and the results of its calls if there is room for another turn; raises TypeError for a chat with tools."""
        self.token_ids += token_ids
        self.num_turns += 1
        self.is_done = self.environment is None or self.num_turns == recipe.environment.max_turns
        if self.environment is None or self.is_done or self.room(recipe) < 1:
            self.is_done = True
            return
        result = await self.environment.step(text)
        self.is_done = result.done
        if not result.done:
            if not isinstance(result.observation, str):
                raise TypeError("tools of chat prompts are not evaluated here: give the prompts as text")
            self.token_ids += text_tokens(result.observation, tokenizer)
            self.is_done = self.room(recipe) < 1

    def room(self, recipe: Recipe) -> int:
        """Tokens that may still be drawn."""
        return recipe.sampling.max_new_tokens - len(self.token_ids)


def evaluate(recipe: Recipe, weights: Path) -> dict[str, float]:
    """The mean of each reward function over the greedy answers to all rows of `data.path`."""
    tokenizer = load_tokenizer(recipe.model.path)
    engine = Engine(weights, recipe.model.compute_type, _RUNNING, tokenizer=tokenizer)
    return asyncio.run(_answered(recipe, engine, tokenizer))


async def _answered(recipe: Recipe, engine: Engine, tokenizer: Any) -> dict[str, float]:
    tools = [load_object("environment.tools", path) for path in recipe.environment.tools]
    raw = open_rows(recipe.data)
    rows = [msgspec.json.decode(raw[index]) for index in range(len(raw))]
    answers: list[Answer] = []
    for row in rows:
        environment = ToolEnvironment(tools) if tools else None
        if environment is not None:
            await environment.reset(**row)
        answers.append(Answer(row, prompt_tokens(row, tokenizer, recipe.data), environment))
    while live := [answer for answer in answers if not answer.is_done]:
        prompts = [answer.prompt_ids + answer.token_ids for answer in live]
        params = [SamplingParams(answer.room(recipe), temperature=0.0, stop=recipe.sampling.stop) for answer in live]
        for answer, turn in zip(live, engine.generate(prompts, params), strict=True):
            await answer.take(turn.token_ids, turn.text, recipe, tokenizer)
    return _scores(recipe, answers, tokenizer)


def _scores(recipe: Recipe, answers: list[Answer], tokenizer: Any) -> dict[str, float]:
    texts = [tokenizer.decode(answer.token_ids, skip_special_tokens=True) for answer in answers]
    prompts = [answer.row["prompt"] for answer in answers]
    batch = {
        "prompts": prompts,
        "completions": [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ],
        "completion_ids": [answer.token_ids for answer in answers],
        "columns": {name: [answer.row.get(name) for answer in answers] for name in answers[0].row if name != "prompt"},
    }
    scores = {
        each.name: each.score(batch).rewards
        for each in load_functions(recipe.reward.functions, 0, recipe.reward.timeout_s)
    }
    return {name: sum(reward or 0.0 for reward in rewards) / len(rewards) for name, rewards in scores.items()}


if __name__ == "__main__":
    wanted = read_recipe(sys.argv[1], [])
    for folder in sys.argv[2:]:
        print(json.dumps(evaluate(wanted, Path(folder))), flush=True)
