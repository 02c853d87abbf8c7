"""The longest prompt of a recipe's data in tokens, for the plan of its memory."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ...comm.errors import SettingError, UnusablePrompt
from ...comm.recipe import DataSettings, EnvironmentSettings, Recipe
from ...trainer.policy.checkpoint_files import find_checkpoint

_SAMPLE_ROWS = 4096
"""Rows of each set that are looked at."""
_TOKENIZED = 32
"""Number of these, the longest in bytes, whose tokens are counted."""


class PromptLength(NamedTuple):
    """Tokens of the longest prompt that was found, in `num_prompts` of them."""

    tokens: int
    num_prompts: int

    def __str__(self) -> str:
        return f"the longest of {self.num_prompts:,} prompts has {self.tokens:,} tokens"

    def row_tokens(self, environment: EnvironmentSettings, max_new_tokens: int, context: int) -> int:
        """Tokens of the longest trajectory: prompt and response, at most the `context` (0 is not bounded).

        Answers of tools and environments count in the response. But an environment may add to the prompt itself at its reset, and
        only the context bounds that.
        """
        if environment.path and context:
            return context
        longest = self.tokens + max_new_tokens
        return min(longest, context) if context else longest


def longest_prompt(recipe: Recipe, unmade: Collection[str] = ()) -> PromptLength | None:
    """The longest prompt in the first rows of each set of data and evaluation; None if they cannot be read, which the checks of a start report.

    Only the longest prompts in bytes are tokenized, so that it stays quick. Later rows may have longer ones: a run never relies on
    this number.
    """
    from .checks.data import check_data
    from .checks.evaluation import check_evaluation

    if {"data.path", "model.path"} & set(unmade) or not any(recipe.data.paths):
        return None
    try:
        folder = find_checkpoint(recipe.model.path)
        sets: list[tuple[DataSettings, list[Any]]] = [(recipe.data, check_data(recipe.data, _SAMPLE_ROWS).prompts)]
        sets += [(settings, found.prompts) for settings, found in check_evaluation(recipe)]
        lengths = [_longest(prompts, folder, settings, recipe.environment) for settings, prompts in sets]
    except (SettingError, UnusablePrompt, OSError):
        return None
    return PromptLength(max(lengths), sum(len(prompts) for _, prompts in sets))


def _longest(prompts: list[Any], folder: Path, settings: DataSettings, environment: EnvironmentSettings) -> int:
    candidates = sorted(prompts, key=_num_bytes, reverse=True)[:_TOKENIZED]
    file = folder / "tokenizer.json"
    if file.exists() and all(isinstance(prompt, str) for prompt in candidates):
        from tokenizers import Tokenizer  # a chat template needs transformers, and with it torch; text does not

        tokenizer = Tokenizer.from_file(str(file))
        return max(len(found.ids) for found in tokenizer.encode_batch(candidates))
    from ...rollout.engine.chat_template import prompt_tokens
    from ...rollout.environments.schemas import tool_schemas
    from ...trainer.policy.model import load_tokenizer

    form = load_tokenizer(folder), settings, tool_schemas(environment)
    return max(len(prompt_tokens({"prompt": prompt}, *form)) for prompt in candidates)


def _num_bytes(prompt: Any) -> int:
    """Bytes of the text of a prompt, or of its messages."""
    if isinstance(prompt, str):
        return len(prompt.encode())
    if isinstance(prompt, dict):
        return sum(map(_num_bytes, prompt.values()))
    return sum(map(_num_bytes, prompt)) if isinstance(prompt, Iterable) else 0
