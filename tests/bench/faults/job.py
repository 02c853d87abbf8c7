"""The run that faults strike: a small policy of random weights, two rollouts, checkpoints, moves between rollouts.

It needs nothing but this package. It is started again with `run.resume=auto` whenever it has ended.
"""

import json
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from headrace.comm.errors import WaitTimeout
from headrace.comm.trace import FAILPOINTS
from headrace.comm.waits import waiting
from headrace.launch.processes.child import Child
from headrace.launch.recipes import sort_digits
from headrace.launch.recipes.tiny_policy import build_policy
from headrace.relay.journal import events as ev

from .journal_tail import JournalTail
from .processes import find, processes_of, send, started_at

ENDLESS = 1_000_000
START_S, END_S = 240.0, 180.0
"""Longest time of a start up to the first step, and of an end."""
_WARM_UP_STEPS = 40
_NUM_ROWS = 512
_REWARD = '''
def reward(completions, **_):
    """The share of even digits."""
    return [sum(c in "02468" for c in text) / max(len(text), 1) for text in completions]
'''
_SETTINGS = {
    "run.steps": ENDLESS,
    "roles.rollout": 2,
    "batch.prompts_per_step": 4,
    "batch.samples_per_prompt": 4,
    "sampling.max_new_tokens": 40,
    "generator.max_running": 32,
    "checkpoint.every": 4,
    "checkpoint.keep": 2,
    "repack.period_s": 0.02,
    "comm.interface": "127.0.0.1",
}


class FaultyJob:
    """One run in a folder of its own. `temporary` is the folder that its processes have for temporary files."""

    def __init__(self, home: Path, num_relays: int = 1) -> None:
        self.home = home
        self.dir = home / "run"
        self.temporary = home / "tmp"
        self.failpoints = home / "failpoints"
        self.tail = JournalTail(self.dir / "journal.jsonl")
        self.num_starts = 0
        self.cold_start_s: float | None = None
        """Seconds from the start of the trainer's process to its first step, without those in which it waited for rows: at the
        last start of the run, beside all other processes that start. None if that trainer had ended by then."""
        self._num_relays = num_relays
        self._launcher: Child | None = None

    def make(self, seed: int) -> None:
        """Make the policy, the data and the reward function."""
        self.temporary.mkdir()

        def example(random: Random) -> tuple[str, str]:
            prompt = sort_digits.draw_prompt(random)
            return prompt, sort_digits.demonstrate(prompt, random)

        build_policy(self.home / "policy", sort_digits.CHARACTERS, example, seed=seed, num_steps=_WARM_UP_STEPS)
        sort_digits.write_data(self.home / "prompts.jsonl", _NUM_ROWS, seed)
        (self.home / "reward.py").write_text(_REWARD, encoding="utf-8")

    def start(self) -> None:
        """Start the run, or resume it, and wait for its next step. Raises `WaitTimeout`, also if the run ends before."""
        settings: dict[str, Any] = {
            **_SETTINGS,
            "run.dir": self.dir,
            "run.resume": "auto" if self.num_starts else "never",
            "roles.relay": self._num_relays,
            "model.path": self.home / "policy",
            "model.dtype": "float32",
            "data.path": self.home / "prompts.jsonl",
            "reward.path": f"{self.home / 'reward.py'}:reward",
        }
        words = [sys.executable, "-m", "headrace.launch.run", *(f"{key}={value}" for key, value in settings.items())]
        environment = {FAILPOINTS: str(self.failpoints), "TMPDIR": str(self.temporary)}
        log = self.home / "console.log"
        self.num_starts += 1
        since = time.time()
        self._launcher = Child(
            "run", words, environment=environment, log=log, console=False, death_signal=signal.SIGTERM
        )
        steps: list[ev.Trained] = []

        def has_trained() -> bool:
            events = self.tail.read()
            self.tail.remember_units(events)
            steps.extend(event for event in events if isinstance(event, ev.Trained) and event.t >= since)
            if not self.is_running():
                raise WaitTimeout("the run ended before its first step")
            return bool(steps)

        with waiting("the run", "its first step", START_S) as wait:
            wait.until(has_trained, 0.1)
        self.cold_start_s = None
        for pid in self.pids("actor-0"):
            with suppress(OSError):
                self.cold_start_s = steps[0].t - started_at(pid) - steps[0].waited_s

    def is_running(self) -> bool:
        return self._launcher is not None and self._launcher.poll() is None

    def is_complete(self) -> bool:
        """Whether every role has a process."""
        names = {process.name for process in processes_of(self.failpoints).values()}
        relays = {f"relay-{index}" for index in range(self._num_relays)}
        return names >= {"hub", "actor-0", "rollout-0", "rollout-1", *relays}

    def interrupt(self) -> None:
        """End the run in order."""
        if self.is_running():
            assert self._launcher is not None
            self._launcher.send(signal.SIGINT)
            self.wait_for_end()

    def wait_for_end(self) -> None:
        """Wait until the launcher has ended. Raises `WaitTimeout`."""
        with waiting("the run", "its end", END_S) as wait:
            wait.until(lambda: not self.is_running(), 0.05)

    def summary(self) -> dict[str, Any] | None:
        """The summary of the last end, None without one."""
        path = self.dir / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def folders(self) -> list[Path]:
        """Those in which the run makes files as it goes on."""
        return [path for path in sorted(self.dir.iterdir()) if path.is_dir()]

    def console(self) -> str:
        """The output of the run so far."""
        return (self.home / "console.log").read_text(encoding="utf-8", errors="replace")

    def console_tail(self) -> str:
        """The last lines of the console."""
        return self._launcher.log_tail(8) if self._launcher is not None else ""

    def pids(self, name: str) -> list[int]:
        """The process ids of a target, see `processes.find`."""
        return find(self.failpoints, name)

    def kill(self) -> list[str]:
        """Kill all processes that are left; returns their names."""
        left = processes_of(self.failpoints)
        send(left, signal.SIGKILL)
        return sorted(process.name for process in left.values())
