"""A hub with its journal, and mailboxes for the processes that it talks to."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from support.hub_order import keep_order
from support.in_memory import MemoryFleet, MemoryNetwork

from headrace.comm.mailbox import Envelope
from headrace.comm.messages import LeaseGrant, LeaseRequest, Message, RowDone
from headrace.comm.recipe import BatchSettings, QueueSettings, RepackSettings
from headrace.relay.dataset.order import PromptPool
from headrace.relay.dataset.rows import JsonLines
from headrace.relay.hub.hub import Hub
from headrace.relay.hub.loop import HubLoop
from headrace.relay.journal import events as ev
from headrace.relay.journal.files import read_events
from headrace.relay.journal.journal import Journal
from headrace.relay.journal.replay import recover
from headrace.relay.journal.state import HubState
from headrace.relay.queue.admission import Admission
from headrace.relay.queue.batch import TRAIN
from headrace.relay.queue.evaluation_prompts import EvaluationPrompts
from headrace.relay.queue.schedules import SCHEDULES
from headrace.relay.queue.tasks import Task, open_sampler

FIRST = 1 << 32
"""The number before the first request of a process's first incarnation."""


class Scene:
    """A hub on a clock that the test advances, and mailboxes for two rollouts, a trainer and a relay.

    Each decision that the hub tells must be in its journal already.
    """

    def __init__(
        self,
        folder: Path,
        samples: int = 2,
        per_step: int = 2,
        tasks: Mapping[str, Task] | None = None,
        repack: RepackSettings | None = None,
        updates: int = 1,
        prompt: str = "p",
        evaluation: EvaluationPrompts | None = None,
        schedule: str = "headrace",
        max_age: float = math.inf,
        **queue: int | bool | str,
    ) -> None:
        data = folder / "data.jsonl"
        data.write_text("".join(f'{{"prompt": "{prompt}{i}"}}\n' for i in range(5)))
        self.path = folder / "journal.jsonl"
        self.journal = Journal(self.path)
        self.network = MemoryNetwork()
        self.mailboxes = self.network.mailboxes
        names = ("rollout-0", "rollout-1", "actor-0", "relay-0")
        self.boxes = {name: self.mailboxes.open(name) for name in names}
        self.now = 0.0
        settings = QueueSettings(**queue)  # pyright: ignore[reportArgumentType]
        batch = BatchSettings(prompts_per_step=per_step, samples_per_prompt=samples, updates_per_version=updates)
        rules = replace(SCHEDULES[schedule], max_age=min(max_age, SCHEDULES[schedule].max_age))
        needs = tasks[TRAIN].needs if tasks else frozenset[str]()
        self.hub = Hub(
            keep_order(self.mailboxes.open("hub"), self.path),
            HubState(),
            self.journal,
            PromptPool(JsonLines(data), shuffle=True, seed=3),
            Admission(batch, settings, 10, rules, sampler=open_sampler(settings.sampler)),
            settings,
            repack or RepackSettings(),
            clock=lambda: self.now,
            tasks=tasks,
            evaluation=evaluation,
        )
        self.hub.context.commit(ev.Opened(epoch=1, samples_per_prompt=samples, needs=tuple(sorted(needs))))

    def close(self) -> None:
        self.journal.close()
        self.mailboxes.close()

    def say(self, sender: str, message: Message) -> None:
        assert self.hub.handle(Envelope(sender, message))

    def heard(self, name: str) -> list[Message]:
        messages = []
        while (envelope := self.boxes[name].receive(0)) is not None:
            messages.append(envelope.message)
        return messages

    def lease(self, holder: str = "rollout-0", request: int = 1, version: int = 0, num_groups: int = 1) -> LeaseGrant:
        self.say(holder, LeaseRequest(request, version, num_groups))
        (grant,) = self.heard(holder)
        assert isinstance(grant, LeaseGrant)
        return grant

    def finish(self, grant: LeaseGrant, holder: str = "rollout-0", reward: Callable[[int], float] = float) -> None:
        for lease in grant.leases:
            for sample in lease.samples:
                row = lease.group.row(sample)
                self.say(holder, RowDone(row, lease.attempt, grant.version, ["relay-0#1"], 5, reward(sample)))


class Restart(Scene):
    """A hub whose process is killed and started again, and the fleet that it finds then."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for role in ("relay", "rollout"):
            self.join(role)

    def join(self, role: str, index: int = 0) -> MemoryFleet:
        return MemoryFleet.join_network(self.network, role, index)

    def restart(self) -> None:
        """Start the next hub. The messages of the one before have arrived, and are forgotten here."""
        self.journal.close()
        for name in self.boxes:
            self.heard(name)
        hub, queue, repack = self.hub, self.hub.results.queue, self.hub.repacking.settings
        self.journal = Journal(self.path)
        mailbox, state = keep_order(self.mailboxes.open("hub"), self.path), recover(self.path)
        self.hub = Hub(
            mailbox, state, self.journal, hub.prompts.pool, hub.leases.admission, queue, repack, lambda: self.now
        )
        self.hub.context.commit(ev.HubRestarted())
        HubLoop(self.hub, self.join("hub")).recover()

    def events(self) -> list[ev.Event]:
        return [event for _, event in read_events(self.path)]
