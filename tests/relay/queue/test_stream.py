"""A stream plans the same micro-batches on all ranks; a row without a copy removes its group on all ranks."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.in_memory import MemoryFleet, MemoryNetwork

from headrace.comm.errors import WaitTimeout
from headrace.comm.messages import (
    EvaluationResult,
    EvaluationsDone,
    GroupId,
    Message,
    NoRowsYet,
    RequestRows,
    RowBatch,
    RowId,
    RowsNotFound,
    Stop,
    TrainBatch,
)
from headrace.comm.messages.base import storage_id_of
from headrace.comm.messages.queue import GroupRef
from headrace.comm.waits import waiting
from headrace.relay.queue.batch import Batch
from headrace.relay.queue.replicated_rows import ReplicatedRows
from headrace.relay.queue.requester import RowRequester
from headrace.relay.queue.stream import PLACES, ExperienceStream

PATIENCE_S = 30.0


class Ranks:
    """Collectives of threads: each contributes a value and gets all values."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait(PATIENCE_S)
        values = list(self.values)
        self.barrier.wait(PATIENCE_S)
        return values


class ThreadRank:
    """A rank's end of `Ranks`."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.size = ranks, rank, len(ranks.values)

    def broadcast(self, message: Message | None) -> Message:
        return self.ranks.exchange(self.rank, message)[0]

    def true_anywhere(self, flags: Sequence[bool]) -> list[bool]:
        return [any(each) for each in zip(*self.ranks.exchange(self.rank, flags), strict=True)]


class Scene:
    """A hub's mailbox, a relay with a storage unit, and a stream on each rank."""

    def __init__(
        self, size: int, max_tokens: int = 10, steps: range = range(1), deadline_s: float = PATIENCE_S
    ) -> None:
        network = MemoryNetwork()
        self.mailboxes, self.hub = network.mailboxes, network.mailboxes.open("hub")
        relay = MemoryFleet.join_network(network, "relay", 0)
        self.unit, self.name = relay.host_rows(), storage_id_of(relay.name, relay.incarnation)
        relay.announce(unit=self.unit.address)
        ranks = Ranks(size)
        self.storage: list[ReplicatedRows] = []
        self.streams: list[ExperienceStream] = []
        for rank in range(size):
            fleet = MemoryFleet.join_network(network, "actor", rank)
            self.storage.append(ReplicatedRows(fleet))
            channel = (fleet.open_mailbox(fleet.name), self.storage[-1], ["train"])
            team = ThreadRank(ranks, rank)
            stream = ExperienceStream(
                *channel, steps=steps, max_tokens=max_tokens, thread_team=team, deadline_s=deadline_s,
                needs_gradient=lambda group: group.rewards[0] > 0,
            )  # fmt: skip
            self.streams.append(stream.start())

    def group(self, prompt: int, lengths: list[int], absent: tuple[int, ...] = (), reward: float = 1.0) -> GroupRef:
        """A group whose third attempts are stored, except for the absent ones."""
        n = len(lengths)
        group = GroupRef(GroupId(0, prompt), list(range(n)), [3] * n, [[self.name]] * n, [0] * n, lengths, [reward] * n)
        for i in set(range(n)) - set(absent):
            self.storage[0].put_new({group.rows()[i].key: {"response_ids": np.full(lengths[i], prompt)}})
        return group

    def answer(self, *groups: GroupRef, total: int) -> None:
        request_id = self.hear(RequestRows).request_id
        batch = TrainBatch(request_id=request_id, step=0, first=0, total=total, groups=list(groups), metrics={})
        self.hub.send("actor-0", batch)

    def hear(self, kind: type[Any]) -> Any:
        while (envelope := self.hub.receive(PATIENCE_S)) is not None:
            if isinstance(envelope.message, kind):
                return envelope.message
        raise AssertionError(f"no {kind.__name__}")

    def answer_overdue(self) -> None:
        """Answer the next request that is overdue, without rows."""
        while not (request := self.hear(RequestRows)).is_overdue:
            pass
        self.hub.send("actor-0", NoRowsYet(request.request_id))

    def batches(self) -> list[Batch]:
        found = [stream.next() for stream in self.streams]
        assert all(isinstance(batch, Batch) for batch in found)
        return found  # pyright: ignore[reportReturnType]

    def close(self) -> None:
        self.hub.send("actor-0", Stop("the test ends"))
        for stream, storage in zip(self.streams, self.storage, strict=True):
            stream.close()
            storage.close()
        self.unit.close()
        self.mailboxes.close()


@pytest.fixture
def scene() -> Iterator[Any]:
    scenes: list[Scene] = []

    def make(size: int, **settings: Any) -> Scene:
        scenes.append(Scene(size, **settings))
        return scenes[-1]

    yield make
    for each in scenes:
        each.close()


def test_ranks_share_the_rows_and_have_equally_many_micro_batches(scene: Any):
    s = scene(2)
    s.answer(s.group(0, [9, 2, 3, 2]), s.group(1, [6, 6]), total=2)
    first, second = s.batches()
    assert len(first.micro_batches) == len(second.micro_batches) > 1
    keys = [row.key for batch in (first, second) for row in batch.rows]
    assert len(set(keys)) == len(keys) == 6
    for batch in (first, second):
        assert all(sum(row.num_tokens for row in part) <= 10 for part in batch.micro_batches)
        assert [len(ids) for ids in batch["response_ids"]] == [row.num_tokens for row in batch.rows]


def test_groups_without_a_gradient_are_last_and_in_equally_many_micro_batches_on_all_ranks(scene: Any):
    s = scene(2)
    s.answer(s.group(0, [9, 2, 3], reward=0.0), s.group(1, [6, 6, 6]), s.group(2, [4], reward=0.0), total=3)
    batches = s.batches()
    assert len({(len(batch.micro_batches), batch.num_forward) for batch in batches}) == 1
    for batch in batches:
        num_trained = len(batch.micro_batches) - batch.num_forward
        assert 0 < num_trained < len(batch.micro_batches)
        assert {row.row.prompt for part in batch.micro_batches[:num_trained] for row in part} == {1}
        assert {row.row.prompt for part in batch.micro_batches[num_trained:] for row in part} <= {0, 2}
    assert sum(len(batch) for batch in batches) == 7


def test_a_rank_without_a_row_gets_an_empty_batch(scene: Any):
    s = scene(2)
    s.answer(s.group(0, [4]), total=1)
    assert sorted(len(batch) for batch in s.batches()) == [0, 1]


def test_a_group_with_a_missing_row_is_left_out_on_all_ranks_and_the_attempt_is_reported(scene: Any):
    s = scene(2)
    s.answer(s.group(0, [5, 5]), s.group(1, [5, 5], absent=(1,)), total=3)
    batches = s.batches()
    assert s.hear(RowsNotFound).attempts == [3]
    for batch in batches:
        assert [group.group for group in batch.row_batch.groups] == [GroupId(0, 0)]
        assert {row.row.group for row in batch.rows} <= {GroupId(0, 0)}
    assert sum(len(batch) for batch in batches) == 2
    assert len({len(batch.micro_batches) for batch in batches}) == 1
    assert s.hear(RequestRows).received == 1, "the group that was left out is requested again"


@pytest.mark.parametrize("absent", [0, 1])
def test_rank_0_reports_a_row_that_any_rank_missed_before_it_requests_again(scene: Any, absent: int):
    s = scene(2)
    s.answer(s.group(0, [9, 8], absent=(absent,)), total=2)
    senders = [s.hub.receive(PATIENCE_S) for _ in range(2)]
    assert [(e.sender, type(e.message)) for e in senders] == [("actor-0", RowsNotFound), ("actor-0", RequestRows)]
    assert senders[0].message.rows == [RowId(0, 0, absent)]


def test_a_stream_waits_beyond_its_deadline_while_the_hub_answers(scene: Any):
    s = scene(2, deadline_s=2.0)
    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        batches = pool.submit(s.batches)
        while time.monotonic() - started < 3.0:
            s.answer_overdue()
        s.answer(s.group(0, [4, 4]), total=1)
        assert len(batches.result(PATIENCE_S)) == 2


def test_a_stream_whose_hub_is_silent_ends_at_its_deadline_and_says_for_whom_it_waited(scene: Any):
    s = scene(1, deadline_s=1.0)
    s.answer_overdue()
    with pytest.raises(WaitTimeout, match="waits for hub, rows for train"):
        s.streams[0].next()


def test_the_other_ranks_hear_from_a_rank_0_whose_places_are_taken(scene: Any):
    s = scene(2, steps=range(3), deadline_s=2.0)
    for step in range(PLACES):
        request = s.hear(RequestRows)
        groups = [s.group(step, [4, 4])]
        s.hub.send(
            "actor-0",
            TrainBatch(request_id=request.request_id, step=step, first=0, total=1, groups=groups, metrics={}),
        )
    with waiting("the streams", "signs", PATIENCE_S) as wait:
        wait.until(lambda: all(stream._fetcher.num_signs > 2 for stream in s.streams))
    assert len(s.batches()) == 2, "the signs have taken no place"


def test_an_evaluation_that_came_with_groups_that_are_lost_is_requested_again(scene: Any):
    s = scene(1)
    request, groups = s.hear(RequestRows), [s.group(0, [5], absent=(0,))]
    evaluation = {"eval/version": 0.0}
    batch = TrainBatch(request_id=request.request_id, step=0, first=0, total=1, groups=groups, metrics={})
    s.hub.send("actor-0", replace(batch, evaluation=evaluation))
    again = s.hear(RequestRows)
    assert (again.received, again.evaluated) == (0, -1)
    answer = replace(batch, request_id=again.request_id, groups=[s.group(1, [5])], evaluation=evaluation)
    s.hub.send("actor-0", answer)
    assert s.batches()[0].row_batch == answer


def test_evaluations_after_the_last_step_come_one_by_one_and_then_the_stream_ends(scene: Any):
    s = scene(2, steps=range(1, 2))
    results = [{"eval/version": float(version), "eval/avg": 0.5} for version in (0, 1)]
    for metrics in results:
        s.hub.send("actor-0", EvaluationResult(s.hear(RequestRows).request_id, metrics))
        assert [stream.next().metrics for stream in s.streams] == [metrics] * 2
    request = s.hear(RequestRows)
    assert (request.step, request.evaluated) == (1, 1), "the hub knows by this which one is next"
    s.hub.send("actor-0", EvaluationsDone(request.request_id))
    assert [type(stream.next()) for stream in s.streams] == [EvaluationsDone] * 2
    assert s.hub.receive(0.3) is None


def test_a_request_lists_the_open_batches_of_each_task():
    mailboxes = MemoryNetwork().mailboxes
    hub, requester = mailboxes.open("hub"), RowRequester(mailboxes.open("task-0"), ["weigh", "score"], 10)
    batches = [RowBatch(request_id=n, task=task, batch_id=1, groups=[]) for n, task in enumerate(("weigh", "score"))]

    def request() -> RequestRows:
        hub.send("task-0", Stop("the test needs the request alone"))
        assert isinstance(requester.request(-1, 0), Stop)
        (*_, envelope) = iter(lambda: hub.receive(0), None)
        assert isinstance(envelope.message, RequestRows)
        return envelope.message

    first_id = request().request_id
    for number, batch in enumerate(batches, 1):
        hub.send("task-0", replace(batch, request_id=first_id + number))
        assert requester.request(-1, 0) == replace(batch, request_id=first_id + number)
    assert request().open_batches == (("score", 1), ("weigh", 1))
    requester.acknowledge(batches[0], [], {})
    assert request().open_batches == (("score", 1),), "the batch of another task has the same number"
