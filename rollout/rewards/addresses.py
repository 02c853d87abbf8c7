"""Reward functions behind an address in `reward.path`.

http://HOST:PORT/score                  gets {"rows": [{"prompt", "completion", each column}]}, answers {"scores": [...]}
judge+http://HOST:PORT/v1#model=NAME    a chat endpoint of OpenAI's form that grades (`judge.py`)
"""

from typing import Any

from ...comm.errors import SettingError
from .endpoint import JUDGE, Address, Endpoint, EndpointError, rows_of
from .judge import Judge


class ScoreEndpoint:
    """A reward function in TRL's form that asks an address for the scores of the rows of a call."""

    def __init__(self, path: str, timeout_s: float) -> None:
        """Raises `SettingError`."""
        address = Address.of(path)
        if unknown := sorted(address.options.keys() - {"key", "name"}):
            raise SettingError(f"reward.path: {path} has the option {unknown[0]!r}; the options are key and name")
        self._url = address.url
        self._endpoint = Endpoint(address, timeout_s)

    async def __call__(self, prompts: list[Any], completions: list[Any], **given: Any) -> list[Any]:
        rows = [
            {**row, "prompt": prompt, "completion": completion}
            for row, prompt, completion in zip(rows_of(given, len(prompts)), prompts, completions, strict=True)
        ]
        answer = await self._endpoint.post({"rows": rows})
        scores = answer.get("scores") if isinstance(answer, dict) else answer
        if not isinstance(scores, list):
            raise EndpointError(f'{self._url}: the answer is neither {{"scores": [...]}} nor a list')
        return scores


def open_address(path: str, timeout_s: float) -> Judge | ScoreEndpoint:
    """The reward function behind an address, for calls of `timeout_s`. Raises `SettingError` for a mistake in it."""
    return Judge(path, timeout_s) if path.startswith(JUDGE) else ScoreEndpoint(path, timeout_s)
