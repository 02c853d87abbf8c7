"""The rollout's side of its environment processes: questions with a trajectory's transcript, answers as they come.

A question fails if its call fails or is too slow (`worker.py` finds that). When a process dies, its questions go to the next process;
without a word of the process about the cause, in halves, until the one that kills it is alone and fails. If the first
`PATIENCE` questions fail, the environment itself is taken to be broken, which is a mistake in the settings.
"""

import json
import logging
import os
import queue
import select
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ...comm.errors import SettingError
from ...comm.recipe import EnvironmentSettings
from ..users_process import start_users_process
from .base import Episode, StepResult

log = logging.getLogger(__name__)

PATIENCE = 3
STARTUP_S, SILENCE_S, CLOSE_S, KILL_S = 60.0, 30.0, 10.0, 30.0
"""Longest time until a process is ready, without a word of it (beside `environment.timeout_s`), until it has closed its
environments at the end of the run, and of its end."""
POLL_S = 0.005


@dataclass(slots=True, eq=False)
class EnvironmentCall:
    """A call of an environment, then its answer or failure. `key` is the caller's, `row` is the data set's."""

    number: int
    """Of the trajectory."""
    key: Any
    row: dict[str, Any]
    episode: Episode
    """Without completions it is a call of `reset`, else of `step` with the newest one."""
    step: StepResult = field(default_factory=StepResult)
    state: Any = None
    failure: str = ""
    is_dropped: bool = False
    """Its trajectory has gone: it is not repeated when its process dies."""

    def question(self, number: int) -> str:
        episode = self.episode
        transcript = {
            "prompt": episode.prompt, "completions": episode.completions, "observations": episode.observations,
            "state": episode.state,
        }  # fmt: skip
        return json.dumps({"id": number, "key": self.number, "row": self.row, **transcript}) + "\n"


class EnvironmentPool:
    """Threads, each with one process of environments, from `start` to `close`. `submit` and `finished` never block."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._done: queue.Queue[EnvironmentCall] = queue.Queue()
        self._hosts = [_Host(settings, self._done, index) for index in range(settings.workers)]
        self._num_failures = 0
        self._has_succeeded = False

    def start(self) -> "EnvironmentPool":
        for host in self._hosts:
            host.thread.start()
        return self

    def submit(self, call: EnvironmentCall) -> None:
        """Ask an environment; all calls of one trajectory go to one process."""
        self._hosts[call.number % len(self._hosts)].todo.put(call)

    def drop(self, number: int) -> None:
        """Forget the environment of a trajectory that has ended here."""
        self._hosts[number % len(self._hosts)].todo.put(number)

    def finished(self) -> list[EnvironmentCall]:
        """The calls answered since the last time. Raises `SettingError` if the environment fails from the start."""
        found: list[EnvironmentCall] = []
        with suppress(queue.Empty):
            while True:
                found.append(self._done.get_nowait())
        for each in found:
            self._has_succeeded |= not each.failure
            self._num_failures += bool(each.failure)
        path = self._settings.path or ", ".join(self._settings.tools)
        if broken := next((host.broken for host in self._hosts if host.broken), ""):
            raise SettingError(f"environment.path: {path} cannot be loaded: {broken}")
        if self._num_failures >= PATIENCE and not self._has_succeeded:
            raise SettingError(f"environment.path: {path} fails on every trajectory: {found[-1].failure}")
        return found

    def close(self) -> None:
        """Close the environments and end their processes; open calls stay unanswered."""
        for host in self._hosts:
            host.is_closing = True
        for host in self._hosts:
            host.thread.join(CLOSE_S + KILL_S)
            if host.thread.is_alive():
                log.warning("%s does not end; the process leaves it behind", host.thread.name)


class _Host:
    """A thread that writes questions to a process and reads its answers, and starts the next process when it ends."""

    def __init__(self, settings: EnvironmentSettings, done: "queue.Queue[EnvironmentCall]", index: int) -> None:
        self.todo: queue.Queue[EnvironmentCall | int] = queue.Queue()
        self.thread = threading.Thread(target=self._run, name=f"environments-{index}", daemon=True)
        self.is_closing = False
        self.broken = ""
        """Why the user's file cannot be loaded."""
        self._settings = settings
        self._done = done
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: dict[int, EnvironmentCall] = {}
        self._suspects: deque[EnvironmentCall] = deque()
        """Calls under way when a process died: they are repeated, at most `_most_suspects` at a time."""
        self._most_suspects = 1
        self._has_word = False
        """The process has named the call that it ends for, or needs to be replaced for no fault of an open call."""
        self._last_id = 0
        self._heard_at = 0.0
        self._unsent, self._unread = b"", b""

    def _run(self) -> None:
        while not self.is_closing and not self.broken:
            self._send_due()
            self._exchange()
        self._end(close_s=min(self._settings.timeout_s, CLOSE_S))

    def _send_due(self) -> None:
        """Queue questions for the process: all that are due, or some suspects alone."""
        if self._suspects:
            if not self._asked:
                for _ in range(min(self._most_suspects, len(self._suspects))):
                    self._ask(self._suspects.popleft())
            return
        with suppress(queue.Empty):
            due = self.todo.get(timeout=0 if self._asked else POLL_S * 4)
            while True:
                if isinstance(due, EnvironmentCall):
                    self._ask(due)
                else:
                    self._drop(due)
                due = self.todo.get_nowait()

    def _ask(self, call: EnvironmentCall) -> None:
        if self._process is None and not self._start():
            call.failure = "the environment's process cannot be started now"
            self._done.put(call)
            return
        self._last_id += 1
        self._asked[self._last_id] = call
        self._unsent += call.question(self._last_id).encode()

    def _drop(self, number: int) -> None:
        for call in self._asked.values():
            call.is_dropped |= call.number == number
        if self._process is not None:
            self._unsent += (json.dumps({"drop": number}) + "\n").encode()

    def _start(self) -> bool:
        """Start the process; returns whether the machine had room for it."""
        settings = {"path": self._settings.path, "tools": self._settings.tools, "timeout_s": self._settings.timeout_s}
        try:
            self._process = start_users_process("headrace.rollout.environments.worker", settings)
        except OSError as error:
            log.warning("an environment process cannot be started now: %s", error)
            return False
        self._heard_at, self._has_word = time.monotonic() + STARTUP_S, False
        return True

    def _exchange(self) -> None:
        """Write what the pipe takes, and handle what has arrived. A process that ends or says nothing is replaced."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        writes = [process.stdin] if self._unsent else []
        readable, writable, _ = select.select([process.stdout], writes, [], POLL_S if self._asked or writes else 0)
        try:
            if writable:
                self._unsent = self._unsent[os.write(process.stdin.fileno(), self._unsent) :]
            chunk = os.read(process.stdout.fileno(), 1 << 16) if readable else None
        except BrokenPipeError:
            chunk = b""
        if chunk == b"" or time.monotonic() - self._heard_at > SILENCE_S + self._settings.timeout_s:
            self._replace()
        elif chunk:
            self._heard_at = time.monotonic()
            *lines, self._unread = (self._unread + chunk).split(b"\n")
            try:
                for line in lines:
                    self._hear(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                log.warning("an environment process wrote something that is not an answer: %r", error)
                self._replace()

    def _hear(self, answer: dict[str, Any]) -> None:
        if answer.get("ready") is False:
            self.broken = answer["error"]
        self._has_word |= "restart" in answer
        if (call := self._asked.get(answer.get("id", 0))) is None:
            return
        failure = str(answer.get("error", ""))
        if not failure:
            call.step, call.state = StepResult(answer["observation"], answer["reward"], answer["done"]), answer["state"]
        call.failure = failure
        self._done.put(self._asked.pop(answer["id"]))

    def _replace(self) -> None:
        """Repeat the open calls of a process that has ended or is silent; one that was alone with it has failed."""
        asked, self._asked = list(self._asked.values()), {}
        wanted = [call for call in asked if not call.is_dropped]
        if self._has_word:
            for call in wanted:
                self.todo.put(call)
        elif len(asked) == 1:
            asked[0].failure = "the environment's process ended, or answered nothing, during this call"
            self._done.put(asked[0])
        else:
            self._suspects.extendleft(reversed(wanted))
            self._most_suspects = max(1, len(asked) // 2)
        log.warning("an environment process is replaced; %d calls were open", len(asked))
        self._end()

    def _end(self, close_s: float = 0.0) -> None:
        """End the process and everything that it has started; it has `close_s` seconds to close its environments."""
        process, self._process = self._process, None
        self._unsent, self._unread = b"", b""
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(close_s)
        process.terminate()  # the guardian kills the others first
        try:
            process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            log.warning("the guardian of an environment process does not end within %g s and is killed", KILL_S)
            process.kill()
        process.stdout.close()
