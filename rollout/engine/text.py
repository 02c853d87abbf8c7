"""Text in and out of the engine: prompts to token ids, responses to text, stop strings."""

from pathlib import Path
from typing import Any

from ...comm.errors import SettingError
from ...trainer.policy.model import load_tokenizer
from .sequence import Sequence

EXTRA_TOKENS = 8
"""Tokens looked at beyond a stop string's characters: one character may be several tokens."""


class Text:
    """A tokenizer, or none: then prompts are token ids and completions have no text."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer

    @staticmethod
    def of(path: str | Path) -> "Text":
        """The tokenizer of a checkpoint, if it has one."""
        try:
            return Text(load_tokenizer(path))
        except SettingError:
            return Text()

    def encode(self, prompt: list[int] | str) -> list[int]:
        """Token ids of a prompt."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise SettingError("prompts are text, but the policy has no tokenizer: give token ids")
        return self.tokenizer.encode(prompt)

    def check_stops(self, strings: tuple[str, ...]) -> None:
        """Raise SettingError for stop strings that cannot be looked for."""
        if strings and self.tokenizer is None:
            raise SettingError("sampling.stop has strings, but the policy has no tokenizer: give token ids")

    def has_ended(self, sequence: Sequence) -> bool:
        """Whether the newest tokens of a response complete one of its stop strings."""
        if not sequence.stop_strings:
            return False
        window = max(len(s) for s in sequence.stop_strings) + EXTRA_TOKENS
        tail = self.tokenizer.decode(sequence.token_ids[-window:], skip_special_tokens=True)
        return any(s in tail for s in sequence.stop_strings)

    def decode(self, sequence: Sequence) -> str:
        """The response as text, up to the first stop string."""
        if self.tokenizer is None:
            return ""
        text = self.tokenizer.decode(sequence.token_ids, skip_special_tokens=True)
        cuts = [text.find(s) for s in sequence.stop_strings if s in text]
        return text[: min(cuts)] if cuts else text
