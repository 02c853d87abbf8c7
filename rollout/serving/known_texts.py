"""The texts of completions with the tokens that were read and drawn for them, so that a text which goes on keeps its tokens.

What `conversations.py` is for chats, this is for a client that appends to a text: only what it has appended is tokenized.
"""

from array import array
from collections.abc import Sequence
from typing import Any

from ..engine.chat_template import text_tokens


class KnownTexts:
    """The texts of one client. Used by one thread."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: one that no other thread uses."""
        self._tokenizer = tokenizer
        self._known: dict[str, array[int]] = {}

    def tokens(self, text: str) -> list[int]:
        """The tokens of a prompt: those of the longest known text that it begins with, and of the rest."""
        found = max((known for known in self._known if text.startswith(known)), key=len, default=None)
        if found is None:
            return list(self._tokenizer.encode(text))
        rest = text[len(found) :]
        return [*self._known[found], *(text_tokens(rest, self._tokenizer) if rest else ())]

    def remember(self, prompt: str, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Keep a prompt with its response. The text of the response has its stop string, and no special tokens."""
        response = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        self._known[prompt + response] = array("q", [*prompt_ids, *token_ids])
