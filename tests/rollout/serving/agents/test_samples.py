"""Samples between two threads: as many are asked for as agents wait for, and none is lost with an agent that leaves."""

import asyncio
from typing import Any

import msgspec
import pytest
from support.closing import at_end
from support.in_memory import MemoryFleet, MemoryNetwork

from headrace.comm.messages import HeldRows, Lease, LeaseGrant, LeaseRequest, RowDone
from headrace.comm.messages.base import GroupId
from headrace.launch.config.load import read_recipe
from headrace.rollout.leased_row import LeasedRow
from headrace.rollout.serving.agents.samples import AgentSamples
from headrace.rollout.serving.fields import RequestRefused

ROW = msgspec.Raw(b'{"prompt": "say"}')


class NoRewards:
    """Reward functions where there are none."""

    backlog = 0

    def submit(self, *requests: LeasedRow) -> None:
        raise AssertionError("an agent has given the reward")

    def finished(self) -> list[LeasedRow]:
        return []

    def close(self) -> None:
        """Nothing to end."""


class Hub:
    """The hub's side: what it is asked for, and its grants."""

    def __init__(self, samples_per_prompt: int = 2) -> None:
        network = MemoryNetwork()
        self.mailbox = MemoryFleet.join_network(network, "hub").open_mailbox("hub")
        fleet = MemoryFleet.join_network(network, "front")
        recipe = read_recipe(None, [f"batch.samples_per_prompt={samples_per_prompt}"])
        rewards: Any = NoRewards()
        self.samples = AgentSamples(fleet, recipe, fleet.open_mailbox(fleet.name), rewards)
        self.samples.start()
        self.num_groups = 0
        at_end(self.close)

    def close(self) -> None:
        self.samples.close("the test has ended")

    def told(self, kind: type) -> list[Any]:
        """The new messages of a kind."""
        found: list[Any] = []
        while (envelope := self.mailbox.receive(0.0)) is not None:
            found += [envelope.message] if isinstance(envelope.message, kind) else []
        return found

    def grant(self, request: LeaseRequest, version: int = 3) -> None:
        """Grant a request all that it asks for."""
        leases: list[Lease] = []
        for _ in range(request.num_groups):
            self.num_groups += 1
            leases.append(Lease(GroupId(0, self.num_groups), 1, [0, 1], ROW))
        self.samples.handle(LeaseGrant(request.request_id, version, leases))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0.01)


def run(work: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await work()

    asyncio.run(bounded())


def test_groups_are_asked_for_by_the_agents_that_wait_and_the_rest_waits_for_the_next():
    hub = Hub()
    hub.samples.advance(3)
    assert not hub.told(LeaseRequest), "no agent waits"

    async def work() -> None:
        waiting = [asyncio.ensure_future(hub.samples.take(20)) for _ in range(3)]
        await settled()
        hub.samples.advance(-1)
        assert not hub.told(LeaseRequest), "no rollout has weights"
        hub.samples.advance(3)
        (request,) = hub.told(LeaseRequest)
        assert (request.num_groups, request.version) == (2, 3), "three samples are in two groups"
        hub.grant(request)
        hub.samples.advance(3)
        assert not hub.told(LeaseRequest), "those on their way to the event loop count"
        taken = [await each for each in waiting]
        taken.append(await hub.samples.take(1))
        assert len({held.row_id.number for held in taken}) == 4
        with pytest.raises(TimeoutError):
            await hub.samples.take(0.05)

    run(work)


def test_a_sample_that_comes_as_its_agent_leaves_goes_to_another():
    hub = Hub()

    async def work() -> None:
        leaver = asyncio.ensure_future(hub.samples.take(20))
        await settled()
        hub.samples.advance(3)
        hub.grant(hub.told(LeaseRequest)[0])
        await asyncio.sleep(0)  # the samples have arrived, and the agent has not run yet
        leaver.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaver
        numbers = {(await hub.samples.take(1)).row_id.number for _ in range(2)}
        assert len(numbers) == 2

    run(work)


def test_what_is_unfinished_at_the_end_is_named_and_claims_are_refused():
    hub = Hub()

    async def work() -> None:
        waiting = asyncio.ensure_future(hub.samples.take(20))
        await settled()
        hub.samples.advance(3)
        hub.grant(hub.told(LeaseRequest)[0])
        held = await waiting
        hub.samples.finish(held, None, "the agent: it broke")
        claims = [asyncio.ensure_future(hub.samples.take(20)) for _ in range(2)]
        await settled()
        hub.samples.close("finished")
        assert (await claims[0]).row_id.sample == 1, "it was free"
        with pytest.raises(RequestRefused, match="the run has ended"):
            await claims[1]
        messages = hub.told(object)
        (done,) = (message for message in messages if isinstance(message, RowDone))
        assert done.failure == "the agent: it broke"
        (rest,) = (message for message in messages if isinstance(message, HeldRows))
        assert [row.sample for row in rest.rows] == [1]
        hub.close = lambda: None

    run(work)
