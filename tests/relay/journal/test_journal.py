"""The journal tells the whole state of the hub, at any length and after any death of its writer."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from headrace.comm.messages import GroupId
from headrace.relay.journal import events as ev
from headrace.relay.journal.journal import Journal, cut_after_checkpoint, main, replay
from headrace.relay.journal.state import HubState, apply

SAMPLES = 2


class Keeper:
    """A journal and the state that it tells."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.jsonl"
        self.journal = Journal(self.path)
        self.state = HubState()
        self.decide(ev.Opened(epoch=1, samples_per_prompt=SAMPLES))

    def decide(self, event: ev.Event) -> None:
        self.journal.append(event)
        apply(event, self.state)

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


def test_a_journal_is_folded_whole_and_its_account_printed(keeper: Keeper, capsys: pytest.CaptureFixture[str]):
    for step in range(6):
        keeper.train_step(fails=step == 0)
    assert replay(keeper.path) == keeper.state
    assert main([str(keeper.path.parent)]) == 0
    told = capsys.readouterr().out
    assert "trained=11 evicted=0 filtered=0 failed=1" in told
    assert "1 x failed: the verifier hung" in told


def test_a_run_folder_holds_no_file_of_the_hub_but_its_journal(keeper: Keeper):
    keeper.train_step()
    keeper.decide(ev.Checkpointed(step=1, path="step_1"))
    assert list(keeper.path.parent.iterdir()) == [keeper.path]


def test_resuming_at_a_checkpoint_ends_in_the_state_of_that_checkpoint(keeper: Keeper):
    keeper.train_step()
    keeper.decide(ev.Checkpointed(step=1, path="step_1"))
    expected = msgspec.msgpack.encode(keeper.state)
    keeper.train_step()
    keeper.journal.close()
    cut_after_checkpoint(keeper.path, 1)
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
    assert replay(keeper.path) == keeper.state


FULL_DISK = """
import resource, sys
from pathlib import Path
from headrace.relay.journal.events import Opened
from headrace.relay.journal.journal import Journal, JournalError

journal, epoch = Journal(Path(sys.argv[1])), 0
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
try:
    while True:
        journal.append(Opened(epoch=epoch + 1, samples_per_prompt=2))
        epoch += 1
except JournalError as error:
    print(epoch, Path(sys.argv[1]).stat().st_size, error)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
journal.append(Opened(epoch=epoch + 1, samples_per_prompt=2))
journal.close()
"""


def test_a_line_that_the_disk_has_no_room_for_leaves_the_journal_as_it_was(tmp_path: Path):
    """The limit of a file's size acts as a full disk does: the last write takes a part of the line, the next one fails."""
    path = tmp_path / "journal.jsonl"
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    epoch, num_bytes, told = done.stdout.split(" ", 2)
    assert int(num_bytes) < 1000, "half a line is cut off again"
    assert str(path) in told and "run.dir" in told and "File too large" in told
    assert replay(path).epoch == int(epoch) + 1, "the journal goes on when there is room again"


def test_the_state_does_not_grow_with_the_run(tmp_path: Path):
    keeper, sizes = Keeper(tmp_path), []
    for step in range(1, 1001):
        keeper.train_step(fails=step % 7 == 0)
        if step in (100, 1000):
            sizes.append(len(msgspec.msgpack.encode(keeper.state)))
    keeper.journal.close()
    assert sizes[1] <= sizes[0] + 20  # longer numbers
