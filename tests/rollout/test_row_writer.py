"""Finished trajectories are written together where they are ready together, and reported once they can be read."""

from collections.abc import Mapping

import numpy as np
import pytest
from support.in_memory import MemoryFleet, MemoryNetwork

from headrace.comm.messages import RowDone, RowId, RowsStreamed, SampleScored
from headrace.comm.messages.queue import RowRef
from headrace.comm.storage.client import Columns
from headrace.relay.queue.replicated_rows import ReplicatedRows
from headrace.rollout.engine.sequence import Completion
from headrace.rollout.leased_row import LeasedRow
from headrace.rollout.partial_rows import StreamedRow
from headrace.rollout.row_writer import RowWriter


class CountedRows(ReplicatedRows):
    """Storage that notes the keys of each write of new rows."""

    def __init__(self, fleet: MemoryFleet) -> None:
        super().__init__(fleet)
        self.puts: list[list[str]] = []

    def put_new(self, rows: Mapping[str, Columns]) -> dict[str, list[str]]:
        self.puts += [list(rows)] if rows else []
        return super().put_new(rows)


class Scene:
    """A unit, the hub's inbox, and a writer that has not begun."""

    def __init__(self) -> None:
        network = MemoryNetwork()
        relay = MemoryFleet.join_network(network, "relay", 0)
        self.unit = relay.host_rows()
        relay.announce(unit=self.unit.address)
        rollout = MemoryFleet.join_network(network, "rollout", 0)
        self.storage = CountedRows(rollout)
        self.hub = network.mailboxes.open("hub")
        self.writer = RowWriter(rollout.open_mailbox("rollout-0"), self.storage, 30.0)

    def written(self, *items: LeasedRow | list[StreamedRow]) -> list[object]:
        """The messages to the hub for items that were queued before the writer began."""
        for item in items:
            self.writer.submit(item)
        assert self.writer.backlog == len(items)
        self.writer.start()
        self.writer.close()
        assert self.writer.backlog == 0
        found: list[object] = []
        while (envelope := self.hub.receive(0.2)) is not None:
            found.append(envelope.message)
        return found


@pytest.fixture
def scene():
    scene = Scene()
    yield scene
    scene.unit.close()


def done(sample: int, failure: str = "", *, is_evaluation: bool = False) -> LeasedRow:
    row = LeasedRow(RowId(0, 3, sample, is_evaluation), 1, 0, {"prompt": "p"}, failure=failure)
    row.completion = None if failure else Completion(sample, [5, 6], [7] * (sample + 1), [-0.5] * (sample + 1), "stop")
    row.reward = None if failure else 0.25
    return row


def first_tokens(sample: int) -> StreamedRow:
    ref = RowRef(RowId(0, 3, sample), 1, [], 0, 2, is_partial=True)
    return StreamedRow(ref, {"response_ids": np.arange(2, dtype=np.int32)})


def test_rows_that_are_queued_meanwhile_are_written_together_and_reported_in_order(scene: Scene):
    heard = scene.written(*map(done, range(5)))
    keys = [f"0.3.{sample}@1" for sample in range(5)]
    assert scene.storage.puts == [keys] and sorted(scene.unit.listing()) == keys
    assert [(each.row.sample, each.storage_ids) for each in heard if isinstance(each, RowDone)] == [
        (sample, ["relay-0#1"]) for sample in range(5)
    ]


def test_a_row_that_failed_and_a_sample_of_an_evaluation_are_reported_and_not_written(scene: Scene):
    heard = scene.written(done(0), done(1, "no reward"), done(2, is_evaluation=True), done(3))
    assert scene.storage.puts == [["0.3.0@1", "0.3.3@1"]]
    assert [type(each) for each in heard] == [RowDone, RowDone, SampleScored, RowDone]
    assert [each.storage_ids for each in heard if isinstance(each, RowDone)] == [["relay-0#1"], [], ["relay-0#1"]]


def test_first_tokens_keep_their_place_between_finished_rows(scene: Scene):
    heard = scene.written(done(0), done(1), [first_tokens(2), first_tokens(4)], done(2))
    assert [type(each) for each in heard] == [RowDone, RowDone, RowsStreamed, RowDone]
    assert scene.storage.puts == [["0.3.0@1", "0.3.1@1"], ["0.3.2@1"]]


def test_no_more_rows_than_a_request_takes_wait_for_each_other(scene: Scene):
    scene.written(*map(done, range(70)))
    assert [*map(len, scene.storage.puts)] == [64, 6]
