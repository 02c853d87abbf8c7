"""A reward for story models: how often a response has the word `the`, up to six times."""

from typing import Any

WORD, MOST = " the ", 6


def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The number of times, at most MOST."""
    return [float(min(completion.count(WORD), MOST)) for completion in completions]
