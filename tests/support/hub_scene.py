"""A hub with its journal, and mailboxes for the processes that it talks to."""

from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.comm.in_memory import MemoryNetwork
from headrace.comm.mailbox import Envelope
from headrace.comm.messages import (
    LeaseGrant,
    LeaseRequest,
    Message,
    RowDone,
)
from headrace.comm.recipe import BatchSettings, QueueSettings, RepackSettings
from headrace.relay.dataset import JsonLines, PromptPool
from headrace.relay.hub.hub import Hub
from headrace.relay.journal import events as ev
from headrace.relay.journal.journal import Journal
from headrace.relay.journal.state import HubState
from headrace.relay.queue.admission import Admission
from headrace.relay.queue.controller import Task


class Scene:
    """A hub with its journal, and mailboxes for those it talks to."""

    def __init__(
        self,
        folder: Path,
        samples: int = 2,
        per_step: int = 2,
        tasks: Mapping[str, Task] | None = None,
        **queue: int | bool | str,
    ) -> None:
        data = folder / "data.jsonl"
        data.write_text("".join(f'{{"prompt": "p{i}"}}\n' for i in range(5)))
        self.path = folder / "journal.jsonl"
        self.town = MemoryNetwork()
        self.post = self.town.mailboxes
        self.boxes = {name: self.post.open(name) for name in ("rollout-0", "rollout-1", "actor-0", "relay-0")}
        settings = QueueSettings(**queue)  # pyright: ignore[reportArgumentType]
        admission = Admission(
            BatchSettings(prompts_per_step=per_step, samples_per_prompt=samples), settings, num_steps=10
        )
        pool = PromptPool(JsonLines(data), shuffle=True, seed=3)
        self.hub = Hub(
            self.post.open("hub"),
            HubState(),
            Journal(self.path),
            pool,
            admission,
            settings,
            RepackSettings(),
            tasks=tasks,
        )
        self.hub.context.commit(ev.Opened(epoch=1, samples_per_prompt=samples))

    def say(self, sender: str, message: Message) -> None:
        assert self.hub.handle(Envelope(sender, message))

    def heard(self, name: str) -> list[Message]:
        letters = []
        while (letter := self.boxes[name].receive(0)) is not None:
            letters.append(letter.message)
        return letters

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
