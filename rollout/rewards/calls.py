"""Requests of a rollout to its reward functions: samples, and calls that score several samples together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..user_code.host import UserCall

LARGEST = 3.4e38
"""Largest reward in size: a row stores it in 32 bits."""
UNSCORED = "the reward function returned None"
"""Begins the failure of a sample without a reward; the reason follows if a function gave one."""


@dataclass(slots=True)
class ScoreRequest:
    """A trajectory to score, then its reward or failure. `key` is the caller's, `row` is the data set's."""

    key: Any
    row: dict[str, Any]
    completion: str | list[dict[str, Any]]
    """Text, or the messages of several turns."""
    completion_ids: list[int]
    version: int = 0
    """The version of the weights that drew its first token."""
    reward: float | None = None
    failure: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    """`metrics`: numbers to average over a step, each function's reward among them; `extra`: other notes on the sample."""
    frames: list[str] = field(default_factory=list)
    """The lines of the user's code on the way to the error that is the failure."""


Unit = list[ScoreRequest]
"""Samples that are scored by one call: a single one, or a group."""


class _Info(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    metrics: dict[str, float] = {}
    extra: dict[str, Any] = {}


class _Answer(msgspec.Struct):
    rewards: list[float | None] = []
    info: list[_Info] = []
    error: str = ""
    frames: list[str] = []
    is_misuse: bool = False
    """Why the function's result is a mistake of the settings; empty if it is not."""


@dataclass(slots=True, eq=False)
class RewardCall(UserCall):
    """Samples that are scored together."""

    units: list[Unit]
    misuse: str = ""

    @property
    def items(self) -> list[ScoreRequest]:
        """The samples of all units."""
        return [item for unit in self.units for item in unit]

    def question(self) -> dict[str, Any]:
        items = self.items
        columns = {name for item in items for name in item.row} - {"prompt"}
        return {
            "step": max(item.version for item in items),
            "prompts": [item.row["prompt"] for item in items],
            "completions": [_as_message(item) for item in items],
            "completion_ids": [item.completion_ids for item in items],
            "columns": {name: [item.row.get(name) for item in items] for name in sorted(columns)},
        }

    def settle(self, answer: dict[str, Any]) -> "Sequence[RewardCall]":
        items = self.items
        found = msgspec.convert(answer, _Answer)
        if found.error and not found.is_misuse and len(self.units) > 1:
            return [RewardCall([unit]) for unit in self.units]
        if found.error:
            found.rewards = [None] * len(items)
            found.info = [_Info()] * len(items)
        if not len(found.rewards) == len(found.info) == len(items):
            raise ValueError("an answer for other samples")
        for item, reward, info in zip(items, found.rewards, found.info, strict=True):
            is_usable = reward is not None and abs(reward) <= LARGEST  # not so for NaN
            item.reward = reward if is_usable else None
            item.frames = found.frames
            item.info = msgspec.to_builtins(info)
            item.failure = found.error or ("" if is_usable else _unusable(reward, info))
        self.misuse = found.error if found.is_misuse else ""
        return []


def _unusable(reward: float | None, info: _Info) -> str:
    """Why a sample has no reward; beside None a function may give its `reason`."""
    if reward is not None:
        return f"the reward function returned {reward}"
    reasons = [str(note) for name, note in info.extra.items() if name.endswith("/reason")]
    return f"{UNSCORED}: {'; '.join(reasons)}" if reasons else UNSCORED


def _as_message(item: ScoreRequest) -> str | list[dict[str, Any]]:
    """A completion in the form of its prompt: text for text, chat messages for chat messages."""
    if isinstance(item.row["prompt"], str) or not isinstance(item.completion, str):
        return item.completion
    return [{"role": "assistant", "content": item.completion}]
