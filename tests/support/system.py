"""A whole run in one process: every role as a thread, on the in-memory fleet."""

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.closing import at_end
from support.in_memory import MemoryFleet, MemoryNetwork
from support.metric_names import names_in, unexplained
from support.policies import tiny_policy
from support.polling import wait_for

from headrace.comm.fleet import Fleet
from headrace.comm.messages import Interrupted, Stop
from headrace.comm.recipe import Recipe
from headrace.launch.config.load import read_recipe
from headrace.launch.resume import prepare_folder
from headrace.relay import loop as relay_loop
from headrace.relay.hub import loop as hub_loop
from headrace.relay.journal.events import Event, Trained
from headrace.relay.journal.files import read_events
from headrace.rollout import loop as rollout_loop
from headrace.trainer import loop as trainer_loop

REWARD = (
    "def reward(prompts, completions, completion_ids, **rest):\n    return [c.count('a') / 8 for c in completions]\n"
)
ENVIRONMENT = """
import asyncio

class Counter:
    async def reset(self, prompt, **row):
        self.turns = []
        return f" ({len(prompt)})"

    async def step(self, completion):
        self.turns.append(completion)
        await asyncio.sleep(0.01)
        return f"[{len(self.turns)} {sum(map(len, self.turns))}]", len(completion) / 8, len(self.turns) == 4
"""
TURNS = {"sampling.stop": f"[{','.join('abcdefghijklmnopqrs')}]", "sampling.max_new_tokens": 120}
"""A random policy ends its turns."""
PATIENCE_S = 240.0
"""A bound against hanging tests; the machine may be slow."""


class Died(Exception):
    """The end of a trainer in the middle of its work."""


def run_until_death(trainer: trainer_loop.Trainer, fleet: Fleet) -> None:
    """Run a trainer that raises `Died`, and close what the kernel would close with its process."""
    with pytest.raises(Died):
        trainer.run()
    trainer.checkpoints.close()
    trainer.stream.close()
    trainer.learner.close()
    trainer.storage.close()
    fleet.mailboxes.close_inbox(fleet.name)


class System:
    """A hub, a relay, a trainer and rollouts as threads, which end with the test."""

    def __init__(self, folder: Path, **settings: object) -> None:
        tiny_policy(folder, "llama")
        (folder / "rewards.py").write_text(REWARD)
        (folder / "environments.py").write_text(ENVIRONMENT)
        (folder / "data.jsonl").write_text("".join(f'{{"prompt": "say {i}"}}\n' for i in range(20)))
        words = {
            "run.dir": folder / "run",
            "run.steps": 3,
            "model.path": folder / "llama",
            "data.path": folder / "data.jsonl",
            "reward.path": f"{folder / 'rewards.py'}:reward",
            "batch.prompts_per_step": 2,
            "batch.samples_per_prompt": 2,
            "sampling.max_new_tokens": 6,
            "comm.deadline_s": PATIENCE_S,
        } | settings
        self.recipe: Recipe = read_recipe(None, [f"{key}={value}" for key, value in words.items()])
        self.dir = Path(self.recipe.run.dir)
        self.dir.mkdir(exist_ok=True)
        if self.recipe.run.resume == "auto":
            prepare_folder(self.recipe)
        self.network = MemoryNetwork()
        self.threads: dict[str, threading.Thread] = {}
        self.errors: list[BaseException] = []
        at_end(self.close)

    def start(self, role: str, main: Callable[[Any, Any], None], index: int = 0) -> MemoryFleet:
        fleet = MemoryFleet.join_network(self.network, role, index, settings=self.recipe.comm)

        def run() -> None:
            try:
                main(fleet, self.recipe)
                fleet.leave()
            except BaseException as error:  # noqa: BLE001 - `until` raises it in the test
                self.errors.append(error)

        self.threads[fleet.name] = threading.Thread(target=run, name=fleet.name, daemon=True)
        self.threads[fleet.name].start()
        return fleet

    def start_all(self, num_rollouts: int = 2, actor: Callable[[Any, Any], None] = trainer_loop.run) -> "System":
        self.start("hub", hub_loop.run)
        self.start("relay", relay_loop.run)
        self.rollouts = [self.start("rollout", rollout_loop.run, index) for index in range(num_rollouts)]
        self.start("actor", actor)
        return self

    def wait(self) -> dict[str, Any]:
        """The summary, once all threads have ended."""
        self.until(lambda: not any(thread.is_alive() for thread in self.threads.values()))
        assert not self.errors, self.errors
        self.network.mailboxes.close()
        assert not unexplained(names_in(self.dir / "metrics.jsonl")), "docs/use/metrics.md does not explain them"
        return json.loads((self.dir / "summary.json").read_text())

    def wait_for_event(self, kind: str) -> None:
        self.until(lambda: kind in [type(event).__name__ for event in self.events()])

    def num_steps(self) -> int:
        return sum(isinstance(event, Trained) for event in self.events())

    def events(self) -> list[Event]:
        journal = self.dir / "journal.jsonl"
        return [event for _, event in read_events(journal)] if journal.exists() else []

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; fails when a role fails, or when none is left."""

        def is_going_on() -> bool:
            return not self.errors and any(thread.is_alive() for thread in self.threads.values())

        def told() -> str:
            alive = [name for name, thread in self.threads.items() if thread.is_alive()]
            return f"running {alive}, failed {self.errors}"

        wait_for(condition, is_going_on, told, patience_s=PATIENCE_S, interval_s=0.01)

    def interrupt(self) -> None:
        """Tell the hub that the run is interrupted, as after Ctrl-C."""
        mailbox = self.network.mailboxes.open("test")
        mailbox.send("hub", Interrupted(signal.SIGINT))
        mailbox.close()

    def close(self) -> None:
        """Stop the threads that still run: the hub ends the run, then every role gets `Stop`."""
        if not any(thread.is_alive() for thread in self.threads.values()):
            return
        self.interrupt()
        mailbox = self.network.mailboxes.open("test")
        if "hub" in self.threads:
            self.threads["hub"].join(PATIENCE_S)
        for name in self.threads:
            mailbox.send(name, Stop("the test has ended"))
        for thread in self.threads.values():
            thread.join(PATIENCE_S)
        left = [name for name, thread in self.threads.items() if thread.is_alive()]
        assert not left, f"still running after the test: {left}; failed: {self.errors}"
