"""Text in and out of the engine: prompts to token ids, responses to text, stop strings."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...comm.errors import SettingError
from ...trainer.policy.model import load_tokenizer
from .sequence import Sequence

if TYPE_CHECKING:
    from ...trainer.policy.model import Policy
    from .sampling import SamplingParams

EXTRA_TOKENS = 8
"""Tokens decoded beyond the bytes of a stop string; a token has at least one byte."""
MOST_BYTES = 4
"""Most bytes of a character."""


class Text:
    """A tokenizer, or None: then prompts are token ids and completions have no text."""

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
        """The token ids of a prompt; raises SettingError for text without a tokenizer."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise SettingError("prompts are text, but the policy has no tokenizer: give token ids")
        return self.tokenizer.encode(prompt)

    def split_stops(self, stops: tuple[str | int, ...]) -> tuple[tuple[str, ...], frozenset[int]]:
        """Stop strings and stop ids. A special token's text is its id, since decoded text leaves it out.

        Raises SettingError for strings without a tokenizer to find them.
        """
        strings = [stop for stop in stops if isinstance(stop, str)]
        if strings and self.tokenizer is None:
            raise SettingError("sampling.stop has strings, but the policy has no tokenizer: give token ids")
        special = self._special if strings else {}
        ids = {stop for stop in stops if isinstance(stop, int)} | {special[text] for text in strings if text in special}
        return tuple(text for text in strings if text not in special), frozenset(ids)

    @cached_property
    def _special(self) -> dict[str, int]:
        """The ids of special tokens by their text."""
        return {token.content: number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    def sequence(
        self, policy: "Policy", prompt_ids: list[int], params: "SamplingParams", trajectory_id: int, key: int
    ) -> Sequence:
        """A trajectory at its prompt, with the stops and the limit that its parameters and the policy give it."""
        strings, stop_ids = self.split_stops(params.stops)
        if not params.ignore_eos:
            stop_ids |= policy.stop_ids
        limit = min(params.max_new_tokens, policy.context - len(prompt_ids))
        return Sequence(trajectory_id, key, prompt_ids, params, limit, stop_ids, strings)

    def has_ended(self, sequence: Sequence) -> bool:
        """Whether the newest tokens of a response complete one of its stop strings."""
        if not sequence.stop_strings:
            return False
        window = max(len(s.encode()) for s in sequence.stop_strings) + EXTRA_TOKENS
        for more in range(MOST_BYTES):
            start = max(sequence.turn_start, len(sequence.token_ids) - window - more)
            tail = self.tokenizer.decode(sequence.token_ids[start:], skip_special_tokens=True)
            if any(s in tail for s in sequence.stop_strings):
                return True
            if "\ufffd" not in tail:
                break  # else the first character may be cut, which with tokens of one byte spoils those after it
        return False

    def decode(self, sequence: Sequence) -> str:
        """The present turn as text, up to the first stop string."""
        if self.tokenizer is None:
            return ""
        text = self.tokenizer.decode(sequence.token_ids[sequence.turn_start :], skip_special_tokens=True)
        cuts = [text.find(s) for s in sequence.stop_strings if s in text]
        return text[: min(cuts)] if cuts else text


def check_prompt(prompt_ids: list[int], policy: "Policy") -> None:
    """Raise SettingError for a prompt that the policy cannot take."""
    if not all(isinstance(token, int | np.integer) for token in prompt_ids):
        raise SettingError("a prompt is text or a list of token ids, which are whole numbers")
    if not prompt_ids:
        raise SettingError("a prompt has no tokens: remove it from data.path")
    if len(prompt_ids) >= policy.context:
        raise SettingError(
            f"a prompt of {len(prompt_ids)} tokens leaves no room in the policy's context of {policy.context}: "
            "shorten the prompts of data.path or take a model.path with a longer context"
        )
    if max(prompt_ids) >= policy.vocab_size or min(prompt_ids) < 0:
        raise SettingError(f"a prompt has token ids outside the policy's vocabulary of {policy.vocab_size}")
