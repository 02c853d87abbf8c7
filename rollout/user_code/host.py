"""Pools of processes of user code. A thread for each asks by JSON lines, and each call is answered or fails.

When a process dies, or does not answer in time, its calls go to the next one: all together if the process has said that they are not
to blame, else in halves, until the call that is to blame is alone and fails.

A call that fails costs its trajectory. If the first `PATIENCE` fail, or the user's file cannot be loaded, the settings are to blame.
"""

import json
import logging
import math
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, Self, TypeVar

from ...comm.environment import environment_of_users_code
from ...comm.errors import SettingError
from ...comm.recipe import EnvironmentSettings, RewardSettings
from ...relay.dataset.rows import is_too_deep

log = logging.getLogger(__name__)

PATIENCE = 3
"""Calls that may fail before one has worked."""
STARTUP_S = 60.0
"""Longest time until a process is ready."""
SILENCE_S = 30.0
"""Longest silence of a process that sends beats, beside the section's `timeout_s`."""
LATE_S = 1.0
"""Seconds after a call's deadline within which the process itself reports that the call is late."""
CLOSE_S = 10.0
"""Longest time that a process has at the end of the run to close what it holds."""
KILL_S = 30.0
"""Longest time until its guardian has ended it."""
EXIT_GRACE_S = 1.0
"""Longest time between the end of its output and its exit."""
BUSY_S = 0.005
"""Longest wait of the thread at a time while calls are open."""
IDLE_S = 0.02
"""Longest wait of the thread at a time without open calls."""


@dataclass(slots=True, eq=False, kw_only=True)
class UserCall:
    """A call of user code; rewards and environments say what it is about."""

    deadline: float = math.inf
    """Time on the monotonic clock."""
    is_dropped: bool = False
    """Its caller no longer waits: it is not asked again."""

    def question(self) -> dict[str, Any]:
        """The call as JSON."""
        raise NotImplementedError

    def settle(self, answer: dict[str, Any]) -> Sequence[Self]:
        """Take the answer, or its `error`; returns calls to ask alone in place of this one.

        Raises for an answer that does not fit, with nothing changed: any output of the user's code may look like an answer.
        """
        raise NotImplementedError


C = TypeVar("C", bound=UserCall)


class UserCodeHost(Generic[C]):
    """One process and its open calls, which go to `done` when they have ended. It starts when needed, and again after its end."""

    def __init__(
        self, kind: str, index: int, settings: Mapping[str, object], timeout_s: float, done: queue.Queue[C],
        take: "Callable[[UserCodeHost[C], float], Iterator[C]]", *, has_beats: bool,
    ) -> None:  # fmt: skip
        """kind: the section of the recipe. settings: what the process gets. take: the next calls, which it waits for so many seconds.

        has_beats: the process says that it lives, finds calls that are late itself, and has something to close.
        """
        self.thread = threading.Thread(target=self._run, name=f"{kind}-{index}", daemon=True)
        self.index = index
        self.is_closing = False
        self.broken = ""
        """Why the user's file cannot be loaded."""
        self.open: dict[int, C] = {}
        self.waiting = deque[C]()
        """Calls that wait for a process that is ready."""
        self.ready: dict[str, Any] | None = None
        """The first message of the present process, once it has arrived."""
        self._kind = kind
        self._settings = settings
        self._done = done
        self._take = take
        self._call_s = math.inf if has_beats else timeout_s
        self._silence_s = SILENCE_S + timeout_s if has_beats else math.inf
        self._close_s = min(timeout_s, CLOSE_S) if has_beats else 0.0
        self._suspects = deque[C]()
        """Calls of which one may have ended a process: asked before all others, `_most_suspects` at a time."""
        self._most_suspects = 1
        self._is_innocent = False
        """The process has named the call that it ends for, or needs to be replaced for no fault of an open call."""
        self._process: subprocess.Popen[bytes] | None = None
        self._last_id = 0
        self._heard_at = 0.0
        self._unsent = bytearray()
        self._unread = bytearray()

    def tell(self, message: dict[str, Any]) -> None:
        """Send something that has no answer to the present process."""
        if self._process is not None:
            self._unsent += json.dumps(message).encode() + b"\n"

    def _run(self) -> None:
        while not self.is_closing:
            self._ask_due()
            self._exchange()
        self._end(self._close_s)

    def _ask_due(self) -> None:
        """Begin the calls that are due. A process that is not ready yet gets one."""
        if self.open and (self.ready is None or self._suspects):
            return
        if self._suspects:
            most = self._most_suspects if self.ready is not None else 1
            calls = iter([self._suspects.popleft() for _ in range(min(most, len(self._suspects)))])
        else:
            waiting = self.waiting
            self.waiting = deque[C]()
            calls = chain(waiting, self._take(self, 0.0 if self.open or waiting else IDLE_S))
        for call in calls:
            if self.open and self.ready is None:
                self.waiting.append(call)
            elif not call.is_dropped:
                self._ask(call)

    def _ask(self, call: C) -> None:
        self._last_id += 1
        try:
            line = json.dumps({"id": self._last_id, **call.question()}).encode() + b"\n"
        except (ValueError, RecursionError) as error:
            self._settle(call, {"error": f"the question cannot be encoded as JSON: {error}"})
            return
        if self._process is None and (problem := self._start()):
            self._settle(call, {"error": problem})
            return
        call.deadline = math.inf if self.ready is None else time.monotonic() + self._call_s + LATE_S
        self.open[self._last_id] = call
        self._unsent += line

    def _start(self) -> str:
        """Start the process, in a session of its own and without the run's secrets; returns why the machine has no room for it."""
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    f"headrace.rollout.{self._kind}s.worker",
                    json.dumps(self._settings),
                    str(os.getpid()),
                ],
                env=environment_of_users_code(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            return f"the {self._kind} process cannot be started now: {error}"
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._heard_at = time.monotonic()
        return ""

    def _exchange(self) -> None:
        """Write what the pipe takes, and handle what has arrived. A process that ends, is late or says nothing is replaced."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        writes = [process.stdin] if self._unsent else []
        readable, writable, _ = select.select([process.stdout], writes, [], BUSY_S if self.open or writes else 0)
        if writable:
            try:
                del self._unsent[: os.write(process.stdin.fileno(), self._unsent)]
            except BrokenPipeError:  # its last answers are still to be read
                self._unsent.clear()
        if readable:
            if chunk := os.read(process.stdout.fileno(), 1 << 16):
                self._receive(chunk)
            else:
                self._replace(f"the {self._kind} process {self._ending()}")
        if self._process is process:
            self._look_at_clock()

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        if any(call.deadline <= now for call in self.open.values()):
            self._replace(f"no answer within {self._kind}.timeout_s={self._call_s:g}")
        elif now - self._heard_at > (STARTUP_S if self.ready is None else self._silence_s):
            self._replace(f"the {self._kind} process does not answer")

    def _receive(self, chunk: bytes) -> None:
        self._heard_at = time.monotonic()
        self._unread += chunk
        if b"\n" not in chunk:
            return
        *lines, self._unread = self._unread.split(b"\n")
        try:
            for line in lines:
                self._hear(json.loads(line))
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            self._replace(f"the {self._kind} process wrote an invalid answer: {type(error).__name__}")

    def _hear(self, answer: dict[str, Any]) -> None:
        number = answer["id"]
        error = answer.get("error", "")
        if not isinstance(number, int) or not isinstance(error, str) or is_too_deep(answer):
            raise ValueError("not an answer")
        if number == 0:
            self._hear_of_process(answer, error)
        elif (call := self.open.get(number)) is not None:
            self._settle(call, answer)
            del self.open[number]

    def _hear_of_process(self, word: dict[str, Any], error: str) -> None:
        self._is_innocent |= "restart" in word
        if self.ready is None and error:
            self.broken = error
            self._replace(error)
        elif self.ready is None:
            self.ready = word
            for call in self.open.values():
                call.deadline = time.monotonic() + self._call_s + LATE_S

    def _settle(self, call: C, answer: dict[str, Any]) -> None:
        if alone := call.settle(answer):
            self._suspects.extend(alone)
            self._most_suspects = 1
        else:
            self._done.put(call)

    def _replace(self, problem: str) -> None:
        """End the process: a call that was alone with it has failed; others are asked again."""
        asked = self.open
        self.open = {}
        is_innocent = self._is_innocent
        log.warning("%s: %s; %d calls were open", self.thread.name, problem, len(asked))
        self._end()
        if len(asked) == 1 and not is_innocent:
            self._settle(asked.popitem()[1], {"error": problem})
        wanted = [call for call in asked.values() if not call.is_dropped]
        if is_innocent:
            self.waiting.extend(wanted)
        elif wanted:
            self._suspects.extendleft(reversed(wanted))
            self._most_suspects = max(1, len(wanted) // 2)

    def _ending(self) -> str:
        """How a process ends whose output has ended, a moment before."""
        assert self._process is not None
        try:
            return f"ended with {self._process.wait(EXIT_GRACE_S)}"
        except subprocess.TimeoutExpired:
            return "does not answer"

    def _end(self, close_s: float = 0.0) -> None:
        """End the process, `close_s` after its input, and everything that it has started."""
        process = self._process
        self._process = None
        self.ready = None
        self._is_innocent = False
        self._unsent = bytearray()
        self._unread = bytearray()
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
            log.warning("the guardian of %s does not end within %g s and is killed", self.thread.name, KILL_S)
            process.kill()
        process.stdout.close()  # not read to its end: a process that the user's code has started may hold it open


class UserCodePool(Generic[C]):
    """Hosts that work from `start` to `close`."""

    def __init__(
        self,
        kind: str,
        code: str,
        settings: RewardSettings | EnvironmentSettings,
        given: Mapping[str, object],
        *,
        has_beats: bool,
    ) -> None:
        """kind, given, has_beats: as for a host. code: the user's, for errors."""
        self.code = f"{kind}.path: {code}"
        self.has_succeeded = False
        self._num_failures = 0
        self._done: queue.Queue[C] = queue.Queue()
        self._hosts = [
            UserCodeHost(kind, i, given, settings.timeout_s, self._done, self.take, has_beats=has_beats)
            for i in range(settings.workers)
        ]

    def take(self, host: UserCodeHost[C], timeout_s: float) -> Iterator[C]:
        """The next calls of a host, in their order; waits for the first."""
        raise NotImplementedError

    def start(self) -> Self:
        """Start the threads; each starts its process when it has a call."""
        for host in self._hosts:
            host.thread.start()
        return self

    @property
    def is_ready(self) -> bool:
        """Whether a process has loaded the user's files."""
        return any(host.ready is not None for host in self._hosts)

    def ended(self) -> list[C]:
        """The calls that have ended since the last time."""
        found: list[C] = []
        with suppress(queue.Empty):
            while True:
                found.append(self._done.get_nowait())
        return found

    def judge(self, failures: Collection[str]) -> None:
        """Look at the failures of calls that have ended, "" for none; raises `SettingError` if nothing has ever worked."""
        self.has_succeeded |= not all(failures)
        self._num_failures += sum(map(bool, failures))
        if self.has_succeeded:
            return
        if broken := next((host.broken for host in self._hosts if host.broken), ""):
            raise SettingError(f"{self.code} cannot be loaded: {broken}")
        if self._num_failures >= PATIENCE:
            raise SettingError(f"{self.code} fails on every trajectory: {next(iter(failures), '')}")

    def close(self) -> None:
        """End the processes; calls that have not ended stay without an answer."""
        for host in self._hosts:
            host.is_closing = True
        for host in self._hosts:
            host.thread.join(CLOSE_S + KILL_S)
            if host.thread.is_alive():
                log.warning("%s does not end; the process leaves it behind", host.thread.name)
