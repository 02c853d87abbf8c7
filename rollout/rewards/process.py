"""One reward process and its open calls, each with a deadline."""

import json
import logging
import os
import select
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from ...comm.recipe import RewardSettings
from ...relay.dataset.rows import is_too_deep
from ..users_process import start_users_process

log = logging.getLogger(__name__)

MAX_BATCH = 64
"""Most samples of a call, unless one group has more."""
MAX_ASYNC = 256
"""Most samples in open calls of async functions."""
LARGEST = 3.4e38
"""Largest reward in size: a row stores it in 32 bits."""
STARTUP_S = 60.0
EXIT_GRACE_S = 1.0
KILL_S = 30.0


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


Unit = list[ScoreRequest]
"""Samples that are scored by one call: a single one, or a group."""


@dataclass(slots=True)
class Call:
    """A question without an answer, and the time on the monotonic clock when it has to be there."""

    units: list[Unit]
    deadline: float

    @property
    def items(self) -> list[ScoreRequest]:
        return [item for unit in self.units for item in unit]


class RewardProcess:
    """One process of `worker.py` with its guardian, started when needed and again after its end."""

    def __init__(self, settings: RewardSettings, max_steps: int) -> None:
        self.calls: dict[int, Call] = {}
        self.is_async = False
        """Whether all functions are async: then each unit is a call of its own."""
        self._settings = settings
        self._max_steps = max_steps
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._last_id = 0
        self._failed: list[tuple[Call, dict[str, Any]]] = []

    @property
    def room(self) -> int:
        """Samples that may be asked for now, beside the open calls; one of a process that has not started yet."""
        if self._process is None:
            return 0 if self.calls else 1
        if not self.is_async:
            # A second call would wait for the first one's plain functions, at the cost of its own deadline.
            return 0 if self.calls else MAX_BATCH
        return min(1, MAX_ASYNC - sum(len(call.items) for call in self.calls.values()))

    def ask(self, units: list[Unit]) -> None:
        """Begin a call for some units; `answers` has its result within `reward.timeout_s`."""
        problem = self._start() if self._process is None else ""
        call = Call(units, time.monotonic() + self._settings.timeout_s)
        self._last_id += 1
        self.calls[self._last_id] = call
        if problem:
            self._fail_all(problem, {self._last_id})
            return
        columns = {name for item in call.items for name in item.row} - {"prompt"}
        question = {
            "id": self._last_id,
            "step": max(item.version for item in call.items),
            "prompts": [item.row["prompt"] for item in call.items],
            "completions": [_as_message(item) for item in call.items],
            "completion_ids": [item.completion_ids for item in call.items],
            "columns": {name: [item.row.get(name) for item in call.items] for name in sorted(columns)},
        }
        try:
            is_written = self._write(json.dumps(question).encode() + b"\n", call.deadline)
        except (BrokenPipeError, EOFError):
            self._end("")
        else:
            if not is_written:
                self._end(self._late, {self._last_id})

    def answers(self, timeout_s: float) -> list[tuple[Call, dict[str, Any]]]:
        """The calls that have ended, with `rewards` and `info`, or `error`; waits for one up to `timeout_s`.

        With `is_shared` the process ended while other calls were open too, so the error may be another one's.
        """
        if self._failed or not self.calls:
            failed, self._failed = self._failed, []
            return failed
        until = min(time.monotonic() + timeout_s, *(call.deadline for call in self.calls.values()))
        try:
            answer = self._read(until)
        except (EOFError, ValueError):  # the process ends, or does not write JSON lines
            self._end("")
            return self.answers(0)
        if answer is not None:
            call = self.calls.get(answer["id"])
            if call is not None and not _fits(answer, len(call.items)):
                self._end("")
                return self.answers(0)
            return [(self.calls.pop(answer["id"]), answer)] if call is not None else []
        if late := {number for number, call in self.calls.items() if call.deadline <= time.monotonic()}:
            self._end(self._late, late)
            return self.answers(0)
        return []

    def close(self) -> None:
        """End the process and everything that it has started; open calls stay without an answer."""
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.terminate()  # the guardian kills the others first
            try:
                self._process.wait(KILL_S)
            except subprocess.TimeoutExpired:
                log.warning("the guardian of a reward process does not end within %g s and is killed", KILL_S)
                self._process.kill()
            self._process.stdin.close()
            self._process.stdout.close()  # not read to its end: a process that the function has started may hold it open
            self._process, self._unread = None, b""

    @property
    def _late(self) -> str:
        return f"no answer within reward.timeout_s={self._settings.timeout_s:g}"

    def _start(self) -> str:
        """Start the process; returns why it cannot work, or an empty text."""
        functions = self._settings.functions
        weights = self._settings.weights or [1.0] * len(functions)
        settings = {"functions": functions, "weights": weights, "max_steps": self._max_steps}
        try:
            self._process = start_users_process("headrace.rollout.rewards.worker", settings)
        except OSError as error:
            return f"the reward process cannot be started now: {error}"
        try:
            ready = self._read(time.monotonic() + STARTUP_S) or {"error": f"no start within {STARTUP_S:g} s"}
            self.is_async = bool(ready.get("is_async"))
        except (EOFError, ValueError):
            ready = {"error": f"the reward process ended with {self._exit_code()}"}
        if "error" in ready:
            self.close()
            return str(ready["error"])
        return ""

    def _end(self, problem: str, guilty: Collection[int] = ()) -> None:
        """End the process; its open calls have failed. Without `problem` the process has ended, or is to blame, itself."""
        ended = self._exit_code()
        self.close()
        if ended is not None:
            problem, guilty = f"the reward process ended with {ended}", ()
        self._fail_all(problem or "the reward process does not answer", guilty)

    def _fail_all(self, problem: str, guilty: Collection[int]) -> None:
        for number, call in self.calls.items():
            is_shared = len(self.calls) > 1 and number not in guilty
            self._failed.append((call, {"error": problem, "is_shared": is_shared}))
        self.calls.clear()

    def _exit_code(self) -> int | None:
        """The exit code of the process, None if it runs. Its output ends a moment before the process does."""
        assert self._process is not None
        last = max((call.deadline for call in self.calls.values()), default=time.monotonic() + EXIT_GRACE_S)
        try:
            return self._process.wait(max(0.0, min(EXIT_GRACE_S, last - time.monotonic())))
        except subprocess.TimeoutExpired:
            return None

    def _write(self, request: bytes, deadline: float) -> bool:
        """Write a request; False if the deadline passes first: a stopped process does not empty its pipe.

        Answers are read meanwhile, since a process that cannot write its answers reads no request.
        """
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        pipe, answers, rest = self._process.stdin.fileno(), self._process.stdout.fileno(), memoryview(request)
        while rest:
            told, ready, _ = select.select([answers], [pipe], [], max(0.0, deadline - time.monotonic()))
            if told:
                self._receive()
            elif not ready:
                return False
            if ready:
                rest = rest[os.write(pipe, rest) :]
        return True

    def _read(self, deadline: float) -> dict[str, Any] | None:
        """The next answer, or None at the deadline. Raises `EOFError` when the worker has ended, `ValueError` for a stray line."""
        assert self._process is not None and self._process.stdout is not None
        while True:
            line, newline, rest = self._unread.partition(b"\n")
            if newline:
                self._unread = rest
                return _parsed(line)
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            self._receive()

    def _receive(self) -> None:
        """Read what the worker has written, which is there. Raises `EOFError` when it has ended."""
        assert self._process is not None and self._process.stdout is not None
        chunk = os.read(self._process.stdout.fileno(), 1 << 16)
        if not chunk:
            raise EOFError
        self._unread += chunk


def _parsed(line: bytes) -> dict[str, Any]:
    """A line of the worker. The user's code may write to any descriptor of the process; raises `ValueError` if the line is not an answer."""
    try:
        answer = json.loads(line)
    except RecursionError as error:
        raise ValueError("too many lists or objects one inside the other") from error
    if isinstance(answer, dict) and isinstance(answer.get("id"), int):
        return answer
    raise ValueError(f"not an answer: {line[:80]!r}")


def _fits(answer: dict[str, Any], num_items: int) -> bool:
    """Whether an answer has an error, or rewards and notes for so many samples."""
    if "error" in answer:
        return isinstance(answer["error"], str)
    rewards, infos = answer.get("rewards"), answer.get("info")
    if not (isinstance(rewards, list) and isinstance(infos, list) and len(rewards) == len(infos) == num_items):
        return False
    is_whole = all(isinstance(reward, int | float | None) for reward in rewards)
    return is_whole and all(isinstance(info, dict) and not is_too_deep(info) for info in infos)


def _as_message(item: ScoreRequest) -> str | list[dict[str, Any]]:
    """A completion in the form of its prompt: text for text, chat messages for chat messages."""
    if isinstance(item.row["prompt"], str) or not isinstance(item.completion, str):
        return item.completion
    return [{"role": "assistant", "content": item.completion}]
