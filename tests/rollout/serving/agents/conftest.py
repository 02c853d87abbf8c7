"""An office with samples in memory, behind the routes of a front."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.agent import AgentClient
from support.policies import character_tokenizer
from support.served import ScriptedGenerator, Served, serve

from headrace.comm.messages import RowId
from headrace.launch.config.load import read_recipe
from headrace.rollout.engine.sequence import Completion
from headrace.rollout.leased_row import LeasedRow
from headrace.rollout.serving.agents import office as office_module
from headrace.rollout.serving.agents.office import AgentOffice
from headrace.rollout.serving.agents.routes import agent_routes


@dataclass
class MemorySamples:
    """A few samples, and what became of them."""

    free: deque[LeasedRow] = field(default_factory=deque)
    finished: list[tuple[LeasedRow, Completion | None, str]] = field(default_factory=list)
    given_back: list[LeasedRow] = field(default_factory=list)

    async def take(self, timeout_s: float) -> LeasedRow:
        async with asyncio.timeout(timeout_s):
            while not self.free:
                await asyncio.sleep(0.01)
        return self.free.popleft()

    def give_back(self, held: LeasedRow) -> None:
        self.given_back.append(held)
        self.free.append(held)

    def finish(self, held: LeasedRow, completion: Completion | None, failure: str = "") -> None:
        self.finished.append((held, completion, failure))


@dataclass
class Office:
    """A served office and a client of it."""

    served: Served
    samples: MemorySamples
    office: AgentOffice
    client: AgentClient

    def claim(self) -> Any:
        """Claim a sample, which must succeed."""
        reply = self.client.claim()
        assert reply.status == 200, reply.body
        return reply.body

    def finished(self) -> tuple[LeasedRow, Completion | None, str]:
        """The one sample that has ended, once it has."""
        self.served.wait_until(lambda: bool(self.samples.finished))
        (found,) = self.samples.finished
        return found


@pytest.fixture
def open_office(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Office]:
    """Opens an office with settings as in a recipe."""

    def open_it(generator: Any = None, *, num_samples: int = 4, claim_s: float = 5.0, **words: Any) -> Office:
        keys = words.pop("keys", ())
        context = words.pop("context", 256)
        recipe = read_recipe(None, [f"{name.replace('__', '.')}={value}" for name, value in words.items()])
        monkeypatch.setattr(office_module, "CLAIM_S", claim_s)
        rows = (LeasedRow(RowId(0, 1, i), 1, 0, {"prompt": f"say {i}", "answer": i}) for i in range(num_samples))
        samples = MemorySamples(deque(rows))
        made: list[AgentOffice] = []

        def routes(front: Any, access: Any) -> Any:
            made.append(AgentOffice(front, samples, recipe))
            return agent_routes(made[0], access)

        served = serve(generator or ScriptedGenerator(), character_tokenizer(), keys=keys, context=context, more=routes)
        return Office(served, samples, made[0], AgentClient(served.port, keys[0] if keys else ""))

    return open_it
