"""Runs the user's reward functions in processes of their own, with a deadline for each call.

A call that raises, hangs or crashes costs the rewards of its trajectories, never the run. If the first `PATIENCE` trajectories
fail, or so many groups, the function itself is taken to be broken, which is a mistake in the settings; so is a wrong number of rewards at any time.
A reward of None leaves its trajectory out and does not count as a failure of the function; NaN and infinity do. Only if none of the
first `MOST_UNSCORED` trajectories, of several prompts, has a number, the function is taken to lack its `return`.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ...comm.errors import SettingError
from ...comm.recipe import RewardSettings
from .process import LARGEST, Call, RewardProcess, ScoreRequest, Unit

log = logging.getLogger(__name__)

PATIENCE = 3
MOST_UNSCORED, FEWEST_PROMPTS = 64, 4
POLL_S = 0.05
UNSCORED = "the reward function returned None"


class RewardPool:
    """Worker threads, each with one reward process, from `start` to `close`. `submit` and `finished` never block."""

    def __init__(self, settings: RewardSettings, max_steps: int = 0) -> None:
        self.settings = settings
        self._todo: queue.Queue[Unit] = queue.Queue()
        self._done: queue.Queue[Unit] = queue.Queue()
        self._max_steps = max_steps
        self._failures_in_a_row = 0
        self._unscored: list[dict[str, Any]] = []
        """The rows of the data of the samples without a number, until there is one."""
        self._misuse = ""
        self._has_succeeded = False
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"reward-{i}", daemon=True) for i in range(settings.workers)
        ]

    def start(self) -> "RewardPool":
        for thread in self._threads:
            thread.start()
        return self

    def submit(self, *requests: ScoreRequest) -> None:
        """Queue trajectories that one call has to score together."""
        self._todo.put([*requests])

    def finished(self) -> list[ScoreRequest]:
        """The requests scored since the last call.

        Raises `SettingError` if the function fails from the start, or returns a wrong number of rewards.
        """
        paths = ", ".join(self.settings.functions.values())
        if self._misuse:
            raise SettingError(f"reward.path: {paths}: {self._misuse}; it returns one, or None, for each")
        units: list[Unit] = []
        with suppress(queue.Empty):
            while True:
                units.append(self._done.get_nowait())
        items = [item for unit in units for item in unit]
        for item in (unit[0] for unit in units if unit[0].failure != UNSCORED):
            self._has_succeeded |= not item.failure
            self._failures_in_a_row = self._failures_in_a_row + 1 if item.failure else 0
            if not self._has_succeeded and self._failures_in_a_row >= PATIENCE:
                raise SettingError(f"reward.path: {paths} fails on every trajectory: {item.failure}")
        if not self._has_succeeded:
            self._look_at_unscored(items, paths)
        return items

    def _look_at_unscored(self, items: Sequence[ScoreRequest], paths: str) -> None:
        self._has_succeeded = any(not item.failure for item in items)
        self._unscored += [item.row for item in items if item.failure == UNSCORED]
        num_prompts = len(set(map(id, self._unscored)))  # the samples of a prompt share its row
        if self._has_succeeded:
            self._unscored.clear()
        elif len(self._unscored) >= MOST_UNSCORED and num_prompts >= FEWEST_PROMPTS:
            raise SettingError(
                f"reward.path: {paths}: the reward function returned None for all of the first"
                f" {len(self._unscored)} samples; does it lack a `return`?"
            )

    def close(self) -> None:
        """End the reward processes; pending requests, and those of present calls, stay unscored."""
        self._is_closing = True
        for thread in self._threads:
            thread.join(self.settings.timeout_s)
            if thread.is_alive():
                log.warning("%s does not end; the process leaves it behind", thread.name)

    def _work(self) -> None:
        """Ask and answer. Units of a failed call are asked again alone, so that one bad trajectory costs only itself."""
        process, alone = RewardProcess(self.settings, self._max_steps), deque[Unit]()
        while not self._is_closing:
            if alone:
                if not process.calls:
                    process.ask([alone.popleft()])
            elif units := self._next_units(process.room, 0.0 if process.calls else POLL_S):
                process.ask(units)
            has_more = not alone and process.room and not self._todo.empty()
            for call, answer in process.answers(0.0 if has_more else POLL_S):
                self._settle(call, answer, alone)
        process.close()

    def _next_units(self, room: int, timeout_s: float) -> list[Unit]:
        """Waiting units of up to `room` samples together, but one if there is any room."""
        units: list[Unit] = []
        with suppress(queue.Empty):
            while room > 0:
                units.append(self._todo.get(timeout=timeout_s) if timeout_s and not units else self._todo.get_nowait())
                room -= len(units[-1])
        return units

    def _settle(self, call: Call, answer: dict[str, Any], alone: deque[Unit]) -> None:
        if answer.get("is_misuse"):
            self._misuse = answer["error"]
        elif "error" in answer and (answer.get("is_shared") or len(call.units) > 1):
            alone.extend(call.units)
            return
        items = call.items
        rewards, infos = answer.get("rewards", [None] * len(items)), answer.get("info", [{}] * len(items))
        for item, reward, info in zip(items, rewards, infos, strict=True):
            is_usable = reward is not None and abs(reward) <= LARGEST  # not so for NaN
            item.reward, item.info = reward if is_usable else None, info
            item.failure = answer.get("error", "" if is_usable else f"the reward function returned {reward}")
        for unit in call.units:
            self._done.put(unit)
