"""Several hosts of user code, and the judgement whether the code works at all.

A call that fails costs its trajectory. If the first `PATIENCE` fail, or the user's file cannot be loaded, the settings are to blame.
"""

import logging
import queue
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Generic, Self

from ...comm.errors import SettingError
from ...comm.recipe import EnvironmentSettings, RewardSettings
from .host import CLOSE_S, KILL_S, C, UserCodeHost

log = logging.getLogger(__name__)

PATIENCE = 3


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
