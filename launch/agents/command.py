"""`headrace agent`: plays the tasks of another project's environments against a running job, which trains on them."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import yaml

from ...comm.disk import say
from ...comm.errors import SettingError
from ..command_line import CommandParser, exit_code
from .claims import Claims
from .verifiers_tasks import Player, VerifiersTasks, quiet

_KIND = "verifiers:"
_TOLD_S = 60.0
"""Seconds between two lines about the conversations so far."""
_PATIENCE = 8
"""Conversations that may fail before one has had a reward."""
_PAGE = """\
Plays the tasks of a verifiers taskset against a running job, with the taskset's harness, until the run ends.

usage: headrace agent verifiers:TASKSET RUN [KEY=VALUE ...] [--workers N]
       headrace agent verifiers:TASKSET --rows [KEY=VALUE ...] [--limit N]

RUN is the folder of a job with environment.path=serve and rollout.serve, or its address. KEY=VALUE are settings of verifiers' env
section, such as agent.harness.id=null or agent.runtime.type=subprocess. --rows prints a data set with a row for each task:

    headrace agent verifiers:my-taskset --rows > tasks.jsonl
    headrace run mine.yaml data.path=tasks.jsonl environment.path=serve rollout.serve=8000
    headrace agent verifiers:my-taskset runs/mine agent.runtime.type=docker

  --workers N   conversations at a time, by default 16
  --rows        print the rows of all tasks
  --limit N     print those of the first N tasks

A key of the run is read from HEADRACE_API_KEY.

Exit codes: 0 when the run has ended, 1 if it does not answer, 2 for a mistake, 130 after Ctrl-C.
"""


def main(words: Sequence[str]) -> int:
    """Play what the words name; returns the exit code."""
    parser = CommandParser("agent", page=lambda: _PAGE)
    parser.add_argument("words", nargs="+")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--limit", type=int)
    return exit_code(lambda: _agent(parser.parse_intermixed_args(words)))


def _agent(given: argparse.Namespace) -> None:
    names = [word for word in given.words if "=" not in word]
    if not names or not names[0].startswith(_KIND):
        raise SettingError(f"{names[0] if names else 'agent'}: name a taskset as {_KIND}TASKSET")
    if given.workers < 1 or (given.limit is not None and given.limit < 1):
        raise SettingError("--workers and --limit must be above 0")
    settings = _nested([word for word in given.words if "=" in word])
    if given.rows:
        for row in VerifiersTasks(names[0].removeprefix(_KIND), settings).rows(given.limit):
            print(json.dumps(row, ensure_ascii=False))
        return
    if len(names) != 2:
        raise SettingError("agent: name the taskset and the run; --help shows how")
    claims = Claims(names[1])
    tasks = VerifiersTasks(names[0].removeprefix(_KIND), settings)
    quiet()
    asyncio.run(Crew(claims, tasks).work(given.workers))


def _nested(words: Sequence[str]) -> dict[str, Any]:
    """`a.b=1` as {"a": {"b": 1}}. Raises `SettingError`."""
    settings: dict[str, Any] = {}
    for word in words:
        path, _, text = word.partition("=")
        *sections, name = path.split(".")
        section = settings
        for each in sections:
            section = section.setdefault(each, {})
            if not isinstance(section, dict):
                raise SettingError(f"{path}: {each} is a value already")
        try:
            section[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise SettingError(f"{path}: {text!r} is not YAML") from error
    return settings


@dataclass
class Crew:
    """Workers that play conversations until the run ends, and what came of them."""

    claims: Claims
    tasks: VerifiersTasks
    rewards: list[float] = field(default_factory=list)
    """Of the conversations since the last line."""
    num_ended: int = 0
    num_failed: int = 0
    told_at: float = field(default_factory=time.monotonic)

    async def work(self, num_workers: int) -> None:
        """Raises `SettingError` if every conversation fails from the start, `PeerGone` if the run does not answer."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(4 * num_workers))
        workers = [asyncio.create_task(self._work()) for _ in range(num_workers)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self._tell()

    async def _work(self) -> None:
        async with self.tasks.player() as player:
            while (claimed := await asyncio.to_thread(self.claims.claim)) is not None:
                await self._play(player, claimed)
                if time.monotonic() - self.told_at > _TOLD_S:
                    self._tell()

    async def _play(self, player: Player, claimed: dict[str, Any]) -> None:
        number = claimed["id"]
        outcome: dict[str, Any] = {"failure": "the program of the agent has ended"}
        playing = asyncio.create_task(player.play(claimed))
        try:
            while not (await asyncio.wait({playing}, timeout=claimed["idle_timeout_s"] / 2))[0]:
                if await asyncio.to_thread(self.claims.state, number) != "open":
                    playing.cancel()  # the run has given it up
            with suppress(asyncio.CancelledError):
                outcome = await playing
        finally:
            playing.cancel()
            refused = await asyncio.shield(asyncio.to_thread(self.claims.end, number, outcome))
        self._count(outcome, refused)

    def _count(self, outcome: dict[str, Any], refused: str) -> None:
        if "reward" in outcome and not refused:
            self.num_ended += 1
            self.rewards.append(outcome["reward"])
            return
        self.num_failed += 1
        if self.num_failed <= _PATIENCE:
            say(f"a conversation has failed: {outcome.get('failure') or refused}")
        if self.num_failed >= _PATIENCE and not self.num_ended:
            raise SettingError(f"agent: every conversation fails: {outcome.get('failure') or refused}")

    def _tell(self) -> None:
        mean = f", mean reward {sum(self.rewards) / len(self.rewards):.3f} since the last line" if self.rewards else ""
        say(f"{self.num_ended} conversations have ended, {self.num_failed} have failed{mean}")
        self.rewards.clear()
        self.told_at = time.monotonic()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
