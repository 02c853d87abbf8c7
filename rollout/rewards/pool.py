"""Runs the user's reward functions in processes of their own, with a deadline for each call.

A wrong number of rewards is a mistake in the settings at any time. A reward of None leaves its trajectory out and does not count as a
failure of the function; NaN and infinity do. Only if none of the first `MOST_UNSCORED` trajectories, of several prompts, has a number,
the function is taken to lack its `return`.
"""

import queue
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ...comm.errors import SettingError
from ...comm.plugins import load_object
from ...comm.recipe import RewardSettings
from ..leased_row import LARGEST, LeasedRow
from ..user_code.host import UserCall, UserCodeHost, UserCodePool

MAX_BATCH = 64
"""Most samples of a call, unless one group has more."""
MAX_ASYNC = 256
"""Most samples in open calls of async functions."""
MOST_UNSCORED = 64
FEWEST_PROMPTS = 4
UNSCORED = "the reward function returned None"
"""Begins the failure of a sample without a reward; the reason follows if a function gave one."""

Unit = list[LeasedRow]
"""Samples that are scored by one call: a single one, or a group."""


class Rewards(Protocol):
    """Scores trajectories; neither `submit` nor `finished` blocks."""

    @property
    def backlog(self) -> int:
        """Trajectories that wait although the next calls are full: more of them would only get older."""
        ...

    def submit(self, *requests: LeasedRow) -> None:
        """Queue trajectories that are scored together."""
        ...

    def finished(self) -> list[LeasedRow]:
        """The trajectories scored since the last call."""
        ...

    def close(self) -> None:
        """Stop; pending trajectories stay unscored."""
        ...


def open_rewards(settings: RewardSettings, num_steps: int, engine: str) -> Rewards:
    """The reward functions in processes of their own. The trajectories of `rollout.engine=emulated` have no text that they could score."""
    if engine == "emulated":
        return load_object("rollout.engine", "headrace.launch.lab.emulated.rewards:EmulatedRewards")()
    return RewardPool(settings, num_steps).start()


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
    def items(self) -> list[LeasedRow]:
        """The samples of all units."""
        return [item for unit in self.units for item in unit]

    def question(self) -> dict[str, Any]:
        items = self.items
        columns = {name for item in items for name in item.row} - {"prompt"}
        return {
            "step": max(item.version for item in items),
            "prompts": [item.row["prompt"] for item in items],
            "completions": [_as_message(item) for item in items],
            "completion_ids": [_tokens_of(item) for item in items],
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


class RewardPool(UserCodePool[RewardCall]):
    """Reward processes that share one queue. `submit` and `finished` never block.

    Plain functions run in a process's main thread, so one that hangs ends with the process.
    """

    def __init__(self, settings: RewardSettings, max_steps: int = 0) -> None:
        functions = settings.functions
        weights = settings.weights or [1.0] * len(functions)
        given = {"functions": functions, "weights": weights, "max_steps": max_steps, "timeout_s": settings.timeout_s}
        super().__init__("reward", ", ".join(functions.values()), settings, given, has_beats=False)
        self._todo: queue.Queue[Unit] = queue.Queue()
        self._unscored: list[dict[str, Any]] = []
        """The rows of the data of the samples without a number, until there is one."""

    def take(self, host: UserCodeHost[RewardCall], timeout_s: float) -> Iterator[RewardCall]:
        is_async = host.ready is not None and host.ready.get("is_async", False)
        num_open = sum(len(call.items) for call in host.open.values())
        # A second call of plain functions would wait for the first one's, at the cost of its own deadline.
        room = MAX_ASYNC - num_open if is_async else 0 if num_open else MAX_BATCH if host.ready else 1
        units: list[Unit] = []
        with suppress(queue.Empty):
            while room > 0:
                units.append(self._todo.get(timeout=timeout_s) if timeout_s and not units else self._todo.get_nowait())
                room -= len(units[-1])
        if is_async:
            yield from (RewardCall([unit]) for unit in units)
        elif units:
            yield RewardCall(units)

    @property
    def backlog(self) -> int:
        with self._todo.mutex:
            num_waiting = sum(map(len, self._todo.queue))
        return max(0, num_waiting - MAX_BATCH * len(self._hosts))

    def submit(self, *requests: LeasedRow) -> None:
        """Queue trajectories that one call has to score together."""
        self._todo.put([*requests])

    def finished(self) -> list[LeasedRow]:
        """The requests scored since the last call.

        Raises `SettingError` if the function fails from the start, or returns a wrong number of rewards.
        """
        calls = self.ended()
        if misuse := next((call.misuse for call in calls if call.misuse), ""):
            raise SettingError(f"{self.code}: {misuse}; it must return a reward or None for each")
        items = [item for call in calls for item in call.items]
        units = [unit for call in calls for unit in call.units]
        self.judge([unit[0].failure for unit in units if not unit[0].failure.startswith(UNSCORED)])
        self.has_succeeded |= any(not item.failure for item in items)
        if not self.has_succeeded:
            self._look_at_unscored(items)
        return items

    def _look_at_unscored(self, items: Sequence[LeasedRow]) -> None:
        unscored = [item for item in items if item.failure.startswith(UNSCORED)]
        self._unscored += [item.row for item in unscored]
        num_prompts = len(set(map(id, self._unscored)))  # the samples of a prompt share its row
        if unscored and len(self._unscored) >= MOST_UNSCORED and num_prompts >= FEWEST_PROMPTS:
            reason = unscored[-1].failure.removeprefix(UNSCORED)
            raise SettingError(
                f"{self.code}: {UNSCORED} for all of the first {len(self._unscored)} samples"
                f"{reason or '; is a `return` missing?'}"
            )


def _unusable(reward: float | None, info: _Info) -> str:
    """Why a sample has no reward; beside None a function may give its `reason`."""
    if reward is not None:
        return f"the reward function returned {reward}"
    reasons = [str(note) for name, note in info.extra.items() if name.endswith("/reason")]
    return f"{UNSCORED}: {'; '.join(reasons)}" if reasons else UNSCORED


def _tokens_of(item: LeasedRow) -> list[int]:
    return [] if item.completion is None else item.completion.token_ids


def _as_message(item: LeasedRow) -> str | list[dict[str, Any]]:
    """A response in the form of its prompt: text for text, chat messages for chat messages."""
    if isinstance(item.row["prompt"], str) or not isinstance(item.response, str):
        return item.response
    return [{"role": "assistant", "content": item.response}]
