"""A recovered hub knows what the one before it knew, however little of its journal is folded again."""

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.messages import GroupId
from headrace.relay import events as ev
from headrace.relay.journal import Journal, JournalError, cut_after_checkpoint, main, read_events, replay, verify
from headrace.relay.snapshots import KEPT, Prefix, Snapshot, snapshots
from headrace.relay.state import HubState, apply

SAMPLES = 2


class Keeper:
    """A journal that takes a snapshot every few events, and the state that it tells."""

    def __init__(self, folder: Path, snapshot_every: int = 5) -> None:
        self.path = folder / "journal.jsonl"
        self.journal = Journal(self.path, snapshot_every)
        self.state = HubState()
        self.decide(ev.Opened(epoch=1, samples_per_prompt=SAMPLES))

    def decide(self, event: ev.Event) -> None:
        self.journal.append(event)
        apply(event, self.state)
        self.journal.settle(event, self.state)

    def train_step(self, fails: bool = False) -> None:
        group, step = GroupId(0, self.state.cursor), self.state.step
        self.decide(ev.Leased(group=group, samples=[0, 1], attempt=1, version=step, holder="rollout-0"))
        row = group.row(0)
        for sample in range(SAMPLES):
            row = group.row(sample)  # the last one never fails
            if fails and sample == 0:
                self.decide(ev.RowFailed(row=row, reason="the verifier hung"))
            else:
                self.decide(ev.RowReady(row=row, units=["relay-0"], version=step, num_tokens=9, reward=0.5))
        number = step + 1
        self.decide(ev.TaskHanded(task="reference", number=number, consumer="reference-0", rows=[row], attempts=[1]))
        self.decide(
            ev.ColumnsReady(task="reference", number=number, columns=["ref_logprobs"], rows=[row], units=[["relay-0"]])
        )
        self.decide(ev.Handed(step=step, groups=[group]))
        self.decide(ev.Trained(step=step))


@pytest.fixture
def keeper(tmp_path: Path):
    keeper = Keeper(tmp_path)
    yield keeper
    keeper.journal.close()


def test_recovery_folds_the_tail_alone(keeper: Keeper):
    for step in range(6):
        keeper.train_step(fails=step % 2 == 0)
    first = next(snapshots(keeper.path))
    num_events = len(list(read_events(keeper.path)))
    assert num_events - 5 < first.num_lines <= num_events
    assert len(list(snapshots(keeper.path))) == KEPT
    assert replay(keeper.path) == verify(keeper.path) == keeper.state


@given(data=st.data())
def test_folding_on_from_a_snapshot_at_any_event_ends_in_the_same_state(tmp_path_factory, data: st.DataObject):
    folder = tmp_path_factory.mktemp("journal")
    keeper = Keeper(folder, snapshot_every=1000)
    for fails in data.draw(st.lists(st.booleans(), min_size=1, max_size=4)):
        keeper.train_step(fails)
    keeper.journal.close()
    events = [event for _, event in read_events(keeper.path)]
    cut = data.draw(st.integers(1, len(events)))
    early = HubState()
    for event in events[:cut]:
        apply(event, early)
    recovered = Snapshot.of(early, keeper.journal._prefix).state
    assert recovered == early
    for event in events[cut:]:
        apply(event, recovered)
    assert recovered == keeper.state


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_a_damaged_snapshot_counts_for_nothing(keeper: Keeper, damage: str):
    for _ in range(6):
        keeper.train_step()
    newest = max(keeper.path.parent.glob("*.snapshot-*"))
    before = newest.read_bytes()
    changed = {"flipped": before[:-1] + bytes([before[-1] ^ 1]), "cut": before[:-3], "empty": b""}
    newest.write_bytes(changed[damage])
    assert str(next(snapshots(keeper.path)).num_lines) not in newest.name
    assert replay(keeper.path) == keeper.state


def test_a_snapshot_of_another_journal_counts_for_nothing(keeper: Keeper):
    for _ in range(6):
        keeper.train_step()
    text = keeper.path.read_bytes()
    keeper.path.write_bytes(text.replace(b'"num_tokens":9', b'"num_tokens":8', 1))
    assert list(snapshots(keeper.path)) == []
    assert replay(keeper.path).tokens_trained == keeper.state.tokens_trained - 1


def test_verifying_folds_from_the_first_line_and_compares(keeper: Keeper, capsys: pytest.CaptureFixture[str]):
    for step in range(6):
        keeper.train_step(fails=step == 0)
    assert main([str(keeper.path.parent)]) == 0
    told = capsys.readouterr().out
    assert "trained=11 evicted=0 filtered=0 failed=1" in told
    assert "1 x failed: the verifier hung" in told
    newest = max(keeper.path.parent.glob("*.snapshot-*"))
    lied = next(snapshots(keeper.path))
    state = lied.state
    state.tokens_trained += 1
    newest.write_bytes(msgspec.msgpack.encode(Snapshot.of(state, Prefix.of(keeper.path, lied.num_bytes))))
    with pytest.raises(JournalError, match="another state"):
        verify(keeper.path)
    assert main([str(keeper.path.parent)]) == 1


def test_resuming_at_a_checkpoint_starts_from_its_snapshot(keeper: Keeper):
    keeper.train_step()
    keeper.decide(ev.Checkpointed(step=1, path="step_1"))
    expected = msgspec.msgpack.encode(keeper.state)
    keeper.train_step()
    keeper.journal.close()
    cut_after_checkpoint(keeper.path, 1)
    assert next(snapshots(keeper.path)).num_bytes == os.path.getsize(keeper.path)
    assert msgspec.msgpack.encode(replay(keeper.path)) == expected


def test_a_line_that_its_writer_died_in_is_cut_off_before_others_follow(keeper: Keeper):
    keeper.train_step()
    with keeper.path.open("ab") as file:
        file.write(b'{"event":"Trai')
    heir = Journal(keeper.path)
    opened = ev.Opened(epoch=2, samples_per_prompt=SAMPLES)
    heir.append(opened)
    heir.close()
    apply(opened, keeper.state)
    assert replay(keeper.path) == verify(keeper.path) == keeper.state


def test_what_the_hub_knows_does_not_grow_with_the_run(tmp_path: Path):
    keeper, sizes = Keeper(tmp_path, snapshot_every=10_000), []
    for step in range(1, 1001):
        keeper.train_step(fails=step % 7 == 0)
        if step in (100, 1000):
            sizes.append(len(msgspec.msgpack.encode(keeper.state)))
    keeper.journal.close()
    assert sizes[1] <= sizes[0] + 20  # longer numbers
