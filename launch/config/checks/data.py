"""Checks of `data.*`: the settings fit together, the rows can be read, and their prompts fit the policy."""

from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from ....comm.errors import SettingError
from ....comm.recipe import DataSettings, EnvironmentSettings
from ....relay.dataset.opening import checked_prompts, open_rows
from ..model_files import ModelFiles

LEAST_SHARE = 1e-6
"""A smaller share of the prompts, above 0, is taken for a mistake: a round of the mixture would have millions of prompts."""
_SPECIAL_TOKENS = 16
"""More than any tokenizer adds around a text."""


class CheckedData(NamedTuple):
    """The prompts of the sets of a setting, the first row of each set, and the number of all rows."""

    prompts: list[Any]
    first_rows: list[dict[str, Any]]
    num_rows: int = 0


def check_data(settings: DataSettings, most: int | None = None) -> CheckedData:
    """The prompts of the data, of each set at most `most`; every row is checked. Raises `SettingError`."""
    if not any(settings.paths):
        raise SettingError("data.path is not set; it names a file or data set with a column of prompts")
    weights = settings.weights
    if weights and (len(weights) != len(settings.paths) or not sum(weights)):
        raise SettingError(
            f"data.weights: {len(weights)} weights, not all 0, for {len(settings.paths)} sets of data.path"
        )
    if rare := [weight for weight in weights if 0 < weight < LEAST_SHARE * sum(weights)]:
        raise SettingError(f"data.weights: {rare[0]:g} is less than a millionth of their sum; 0 leaves a set out")
    each = [(open_rows(structs.replace(settings, path=path)), path) for path in settings.paths]
    prompts = [prompt for rows, path in each for prompt in checked_prompts(rows, path, settings.prompt_column, most)]
    first_rows = [msgspec.json.decode(rows[0]) for rows, _ in each]
    return CheckedData(prompts, first_rows, sum(len(rows) for rows, _ in each))


def check_lengths(
    settings: DataSettings, prompts: list[Any], policy: ModelFiles, environment: EnvironmentSettings, wanted: int
) -> list[str]:
    """Every prompt leaves room for a response in the policy's context, unless `data.too_long` drops the others."""
    context = policy.context
    if not context:
        return []
    lengths = _long_lengths(settings, prompts, policy, environment, room=context - wanted)
    too_long = [number for number, length in lengths.items() if length >= context]
    if too_long and (settings.too_long == "error" or len(too_long) == len(prompts)):
        number = too_long[0]
        raise SettingError(
            f"data.too_long: prompt {number + 1} of {settings.path} has {lengths[number]} tokens and leaves no room"
            f" for a response (sampling.max_new_tokens={wanted}) in the context of {context} tokens of model.path;"
            f" {len(too_long)} of {len(prompts)} prompts are too long. Shorten them, take a model"
            " with a longer context, or set data.too_long=drop to leave them out"
        )
    num_cut = sum(context - wanted < length < context for length in lengths.values())
    warnings = [f"data.too_long=drop leaves out {len(too_long)} of {len(prompts)} prompts"] if too_long else []
    if num_cut:
        warnings.append(
            f"{num_cut} of {len(prompts)} prompts leave less than sampling.max_new_tokens={wanted}"
            f" of the context of {context} tokens; their responses are cut to fit"
        )
    return warnings


def _long_lengths(
    settings: DataSettings, prompts: list[Any], policy: ModelFiles, environment: EnvironmentSettings, room: int
) -> dict[int, int]:
    """Tokens of the prompts that may have more than `room`, by index; a text never has more tokens than bytes."""
    doubtful = [
        number
        for number, prompt in enumerate(prompts)
        if not isinstance(prompt, str) or len(prompt.encode()) + _SPECIAL_TOKENS > room
    ]
    if not doubtful:
        return {}
    from ....rollout.engine.chat_template import prompt_tokens
    from ....rollout.environments.schemas import tool_schemas
    from ....trainer.policy.model import load_tokenizer

    form = load_tokenizer(policy.folder), settings, tool_schemas(environment)
    return {number: len(prompt_tokens({"prompt": prompts[number]}, *form)) for number in doubtful}
