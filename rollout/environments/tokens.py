"""What an environment says, as the tokens that follow a turn of the policy."""

from collections.abc import Sequence
from typing import Any

from ..engine.chat_template import text_tokens, tokens_behind_turn
from .base import Episode, Messages, as_messages


def observation_tokens(
    episode: Episode, observation: str | Messages, tokenizer: Any, tools: Sequence[Any] | None = None
) -> list[int]:
    """Token ids of an observation after the newest turn: text as it is, or what the chat template puts behind the turn."""
    if isinstance(episode.prompt, str):
        assert isinstance(observation, str)
        return text_tokens(observation, tokenizer)
    turns = episode.messages()[:-1]
    return tokens_behind_turn(episode.prompt, turns, as_messages(observation), episode.last_token, tokenizer, tools)
