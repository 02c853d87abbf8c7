"""Runs the user's reward function in processes of its own, with a deadline for each call.

A call that raises, hangs or crashes costs the rewards of its trajectories, never the run. If the first `PATIENCE` trajectories
fail, the function itself is taken to be broken, which is a mistake in the settings; so is a wrong number of rewards at any time.
A reward of None leaves its trajectory out and does not count as a failure of the function; NaN and infinity do.
"""

import json
import logging
import os
import queue
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...comm.errors import SettingError
from ...comm.recipe import RewardSettings

log = logging.getLogger(__name__)

PATIENCE = 3
MAX_BATCH = 64
STARTUP_S = 60.0
EXIT_GRACE_S = 1.0
KILL_S = 30.0
POLL_S = 0.05
UNSCORED = "the reward function returned None"
LARGEST = 3.4e38
"""Largest reward in size: a row stores it in 32 bits."""


@dataclass(slots=True)
class ScoreRequest:
    """A trajectory to score, then its reward or failure. `key` is the caller's, `row` is the data set's."""

    key: Any
    row: dict[str, Any]
    completion: str | list[dict[str, Any]]
    """Text, or messages of several turns."""
    completion_ids: list[int]
    reward: float | None = None
    failure: str = ""


class RewardPool:
    """Worker threads, each with one reward process, from `start` to `close`. `submit` and `finished` never block."""

    def __init__(self, settings: RewardSettings) -> None:
        self.settings = settings
        self._todo: queue.Queue[ScoreRequest] = queue.Queue()
        self._done: queue.Queue[ScoreRequest] = queue.Queue()
        self._failures_in_a_row = 0
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

    def submit(self, request: ScoreRequest) -> None:
        self._todo.put(request)

    def finished(self) -> list[ScoreRequest]:
        """The requests scored since the last call.

        Raises `SettingError` if the function fails from the start, or returns a wrong number of rewards.
        """
        if self._misuse:
            raise SettingError(f"reward.path: {self.settings.path} {self._misuse}; it returns one, or None, for each")
        items = _drain(self._done)
        for item in (item for item in items if item.failure != UNSCORED):
            self._has_succeeded |= not item.failure
            self._failures_in_a_row = self._failures_in_a_row + 1 if item.failure else 0
        if not self._has_succeeded and self._failures_in_a_row >= PATIENCE:
            failure = next(item.failure for item in reversed(items) if item.failure != UNSCORED)
            raise SettingError(f"reward.path: {self.settings.path} fails on every trajectory: {failure}")
        return items

    def close(self) -> None:
        """End the reward processes after their present calls; pending requests stay unscored."""
        self._is_closing = True
        for thread in self._threads:
            thread.join(self.settings.timeout_s)
            if thread.is_alive():
                log.warning("%s is still in a call of the reward function; the process leaves it behind", thread.name)

    def _work(self) -> None:
        process = _RewardProcess(self.settings)
        while not self._is_closing:
            with suppress(queue.Empty):
                first = self._todo.get(timeout=POLL_S)
                self._score(process, [first, *_drain(self._todo, MAX_BATCH - 1)])
        process.close()

    def _score(self, process: "_RewardProcess", batch: list[ScoreRequest]) -> None:
        """Score a batch; if the call fails, score each alone, so that one bad trajectory costs only itself."""
        answer = process.call(batch)
        if answer.get("is_misuse"):
            self._misuse = answer["error"]
        elif "error" in answer and len(batch) > 1:
            for item in batch:
                if not self._is_closing:
                    self._score(process, [item])
            return
        rewards = answer.get("rewards", [None] * len(batch))
        for item, reward in zip(batch, rewards, strict=True):
            is_usable = reward is not None and abs(reward) <= LARGEST  # not so for NaN
            item.reward = reward if is_usable else None
            item.failure = answer.get("error", "" if is_usable else f"the reward function returned {reward}")
            self._done.put(item)


@dataclass(slots=True)
class _RewardProcess:
    """One process of `worker.py` with its guardian, started when needed and again after its end."""

    settings: RewardSettings
    process: "subprocess.Popen[bytes] | None" = None
    unread: bytes = b""
    last_id: int = 0

    def call(self, batch: list[ScoreRequest]) -> dict[str, Any]:
        """`{"rewards": [...]}` or `{"error": "..."}` within `reward.timeout_s`."""
        if self.process is None and "error" in (ready := self._start()):
            return ready
        columns = {name for item in batch for name in item.row} - {"prompt"}
        self.last_id += 1
        question = {
            "id": self.last_id,
            "prompts": [item.row["prompt"] for item in batch],
            "completions": [_as_message(item) for item in batch],
            "completion_ids": [item.completion_ids for item in batch],
            "columns": {name: [item.row.get(name) for item in batch] for name in sorted(columns)},
        }
        return self._exchange(json.dumps(question).encode() + b"\n", self.settings.timeout_s)

    def close(self) -> None:
        """End the process and everything that it has started."""
        if self.process is not None:
            assert self.process.stdin is not None and self.process.stdout is not None
            self.process.terminate()  # the guardian kills the others first
            try:
                self.process.wait(KILL_S)
            except subprocess.TimeoutExpired:
                log.warning("the guardian of a reward process does not end within %g s and is killed", KILL_S)
                self.process.kill()
            self.process.stdin.close()
            self.process.stdout.close()  # not read to its end: a process that the function has started may hold it open
            self.process, self.unread = None, b""

    def _start(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "headrace.rollout.rewards.worker", self.settings.path, str(os.getpid())]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        self.last_id = 0
        answer = self._exchange(b"", STARTUP_S)
        if "error" in answer:
            self.close()
        return answer

    def _exchange(self, request: bytes, deadline_s: float) -> dict[str, Any]:
        """The answer with the last request's number; an error if the process ends or the deadline passes."""
        deadline = time.monotonic() + deadline_s
        try:
            answer = self._read_answer(deadline) if self._write(request, deadline) else None
        except (BrokenPipeError, ValueError):  # the process ends, or does not write JSON lines
            answer = None
        if answer is not None:
            return answer
        ended = self._exit_code(deadline)
        self.close()
        if ended is None:
            return {"error": f"no answer within reward.timeout_s={self.settings.timeout_s:g}"}
        return {"error": f"the reward process ended with {ended}"}

    def _exit_code(self, deadline: float) -> int | None:
        """The exit code of the process, None if it runs. Its output ends a moment before the process does."""
        assert self.process is not None
        try:
            return self.process.wait(max(0.0, min(EXIT_GRACE_S, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            return None

    def _write(self, request: bytes, deadline: float) -> bool:
        """Write a request; False if the deadline passes first: a stopped process does not empty its pipe."""
        assert self.process is not None and self.process.stdin is not None
        pipe, rest = self.process.stdin.fileno(), memoryview(request)
        while rest:
            _, ready, _ = select.select([], [pipe], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return False
            rest = rest[os.write(pipe, rest) :]
        return True

    def _read_answer(self, deadline: float) -> dict[str, Any] | None:
        """The answer to the last request, or None if the deadline passes or the worker ends."""
        assert self.process is not None and self.process.stdout is not None
        while True:
            line, newline, rest = self.unread.partition(b"\n")
            if newline:
                self.unread = rest
                if (answer := json.loads(line))["id"] == self.last_id:
                    return answer
                continue
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            if not chunk:
                return None
            self.unread += chunk


def _drain(requests: "queue.Queue[ScoreRequest]", most: int | None = None) -> list[ScoreRequest]:
    """The requests in a queue, at most `most`, without waiting."""
    items: list[ScoreRequest] = []
    with suppress(queue.Empty):
        while most is None or len(items) < most:
            items.append(requests.get_nowait())
    return items


def _as_message(item: ScoreRequest) -> str | list[dict[str, Any]]:
    """A completion in the form of its prompt: text for text, chat messages for chat messages."""
    if isinstance(item.row["prompt"], str) or not isinstance(item.completion, str):
        return item.completion
    return [{"role": "assistant", "content": item.completion}]
