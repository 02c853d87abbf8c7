"""The observation of an environment, as the tokens that follow a turn of the policy."""

from collections.abc import Sequence
from typing import Any

from ...comm.recipe import DataSettings
from ..engine.chat_template import text_tokens, tokens_behind_turn
from .base import Episode, Messages, as_messages


def observation_tokens(
    episode: Episode,
    observation: str | Messages,
    tokenizer: Any,
    settings: DataSettings,
    tools: Sequence[Any] | None = None,
) -> list[int]:
    """Token ids of an observation after the newest turn: text as it is, or what the chat template puts after the turn."""
    if isinstance(episode.prompt, str):
        assert isinstance(observation, str)
        return text_tokens(observation, tokenizer)
    messages = episode.prompt, episode.messages()[:-1], as_messages(observation)
    return tokens_behind_turn(*messages, episode.last_token, tokenizer, settings, tools)
