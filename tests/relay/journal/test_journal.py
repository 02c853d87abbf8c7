"""The journal holds the whole state of the hub, at any length and after any death of its writer."""

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.power_cut import PowerCuts
from support.recorder import SAMPLES, Recorder
from support.small_disk import fill, small_disk

from headrace.comm.disk import DiskReserve
from headrace.comm.errors import DiskFull
from headrace.relay.journal import events as ev
from headrace.relay.journal.cutting import cut_after, steps_in
from headrace.relay.journal.files import JournalError, read_events
from headrace.relay.journal.hub_state import account_dict
from headrace.relay.journal.journal import Journal
from headrace.relay.journal.replay import replay
from headrace.relay.journal.state import apply


@pytest.fixture
def recorder(tmp_path: Path):
    recorder = Recorder(tmp_path)
    yield recorder
    recorder.journal.close()


def test_the_replay_of_a_journal_gives_the_state_of_its_writer(recorder: Recorder):
    for step in range(6):
        recorder.train_step(fails=step == 0)
    assert replay(recorder.path) == recorder.state
    assert account_dict(recorder.state) == {
        "leased": 12, "trained": 11, "evicted": 0, "filtered": 0, "failed": 1, "in_flight": 0, "holds": True,
    }  # fmt: skip


def test_resuming_at_a_checkpoint_ends_in_the_state_of_its_steps_however_late_it_was_written(recorder: Recorder):
    recorder.train_step()
    expected = msgspec.msgpack.encode(recorder.state)
    recorder.train_step()
    recorder.commit(ev.Checkpointed(step=1, path="step_1"))
    recorder.train_step()
    recorder.journal.close()
    cut_after(recorder.path, 1, 1, recorder.path.with_name("rest"))
    *_, (_, last) = read_events(recorder.path)
    assert isinstance(last, ev.Checkpointed) and last.step == 1
    state = replay(recorder.path)
    assert state.checkpointed == 1
    state.checkpointed = -1
    assert msgspec.msgpack.encode(state) == expected


def test_damage_after_a_checkpoint_does_not_hide_it(recorder: Recorder):
    """A power cut may leave zeros where the last lines were."""
    recorder.train_step()
    recorder.commit(ev.Checkpointed(step=1, path="step_1"))
    expected = recorder.path.read_bytes().index(b'{"event":"Checkpointed"')
    with recorder.path.open("ab") as file:
        file.write(bytes(100) + b"\n" + b'{"event":"Trained","step":1}\n')
    recorder.journal.close()
    known, rest = steps_in(recorder.path), recorder.path.with_name("rest")
    assert (known.places, known.checkpoints, known.num_trained) == ({1: expected}, {1}, 1)
    with pytest.raises(JournalError, match="has no step 2"):
        cut_after(recorder.path, 2, 1, rest)
    cut_after(recorder.path, 1, 1, rest)
    assert replay(recorder.path).step == 1


def test_a_group_that_an_earlier_version_restored_is_refused(recorder: Recorder):
    """Its rows are in fields that are gone, and would seem to be none."""
    with recorder.path.open("ab") as file:
        file.write(
            b'{"event":"GroupRestored","group":{"epoch":0,"prompt":0},"samples":[0],"attempts":[1],"versions":[0],'
        )
        file.write(b'"num_tokens":[9],"rewards":[0.5],"num_versions":[1],"units":[["relay-0#1"]]}\n')
    with pytest.raises(JournalError, match=r"journal\.jsonl:2: .*`rows`"):
        replay(recorder.path)


def test_a_second_writer_is_refused_until_the_first_has_closed_the_journal(recorder: Recorder):
    recorder.train_step()
    with pytest.raises(JournalError, match=r"in use by another process; end that run, or set another run\.dir"):
        Journal(recorder.path)
    recorder.journal.close()
    Journal(recorder.path).close()
    assert replay(recorder.path) == recorder.state


def test_a_power_cut_leaves_a_checkpoint_that_the_journal_has_and_all_events_before(tmp_path: Path):
    (tmp_path / "run").mkdir()
    with PowerCuts(tmp_path / "run", tmp_path / "cuts") as cuts:
        recorder = Recorder(tmp_path / "run")
        recorder.train_step()
        recorder.commit(ev.Checkpointed(step=1, path="step_1"))
    recorder.journal.close()
    assert replay(cuts.left[-1] / "journal.jsonl") == recorder.state


def test_an_unfinished_last_line_is_cut_off_before_others_follow(recorder: Recorder):
    recorder.train_step()
    recorder.journal.close()
    with recorder.path.open("ab") as file:
        file.write(b'{"event":"Trai')
    journal = Journal(recorder.path)
    opened = ev.Opened(epoch=2, samples_per_prompt=SAMPLES)
    journal.append(opened)
    journal.close()
    apply(opened, recorder.state)
    assert replay(recorder.path) == recorder.state


FULL_DISK = """
import resource, sys
from pathlib import Path
from headrace.relay.journal.events import Opened
from headrace.relay.journal.files import JournalError
from headrace.relay.journal.journal import Journal

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


def test_a_line_that_does_not_fit_on_the_disk_leaves_the_journal_as_it_was(tmp_path: Path):
    """A limit on the size of files acts like a full disk: the last write stores a part of the line, the next one fails."""
    path = tmp_path / "journal.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    epoch, num_bytes, error = done.stdout.split(" ", 2)
    assert int(num_bytes) < 1000, "half a line is cut off again"
    assert str(path) in error and "run.dir" in error and "File too large" in error
    assert replay(path).epoch == int(epoch) + 1, "the journal continues when there is room again"


def test_the_state_does_not_grow_with_the_run(tmp_path: Path):
    recorder, sizes = Recorder(tmp_path), []
    for step in range(1, 1001):
        recorder.train_step(fails=step % 7 == 0)
        if step in (100, 1000):
            sizes.append(len(msgspec.msgpack.encode(recorder.state)))
    recorder.journal.close()
    assert sizes[1] <= sizes[0] + 20  # longer numbers


def test_a_disk_that_stays_full_costs_no_line_and_ends_the_run(tmp_path: Path):
    """The line that found no room, and the last ones, go where the reserve was."""
    with small_disk(tmp_path / "disk", megabytes=3) as disk:
        path = disk / "journal.jsonl"
        journal = Journal(path, deadline_s=0.2, reserve=DiskReserve(disk))
        fill(disk)
        for epoch in range(1, 200):
            journal.append(ev.Opened(epoch=epoch, samples_per_prompt=2))
        assert journal.full.startswith(f"run.dir is full: {path}")
        journal.close()
        assert replay(path).epoch == 199


@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=4))
def test_a_journal_with_changed_bytes_is_legal_or_refused_with_its_line(at: int, replacement: bytes):
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder))
        for step in range(3):
            recorder.train_step(fails=step == 0)
        recorder.journal.close()
        data = bytearray(recorder.path.read_bytes())
        at %= len(data)
        data[at : at + len(replacement)] = replacement
        recorder.path.write_bytes(data)
        try:
            replay(recorder.path)
        except JournalError as error:
            assert "journal.jsonl:" in str(error)


def test_the_rules_of_the_journal_are_never_optimized_away():
    code = "import headrace.relay.journal.state"
    result = subprocess.run([sys.executable, "-O", "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0 and "PYTHONOPTIMIZE" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this host has no /dev/full")
@pytest.mark.parametrize("is_rest", [False, True])
def test_a_full_disk_stops_the_resumption_by_name_and_leaves_no_part_of_a_copy(recorder: Recorder, is_rest: bool):
    recorder.train_step()
    recorder.commit(ev.Checkpointed(step=1, path="checkpoints/step_1"))
    recorder.train_step()
    recorder.journal.close()
    folder, before = recorder.path.parent, recorder.path.read_bytes()
    new, rest = folder / "journal.jsonl.new", folder / "journal.jsonl.discarded-1"
    (rest if is_rest else new).symlink_to("/dev/full")
    with pytest.raises(DiskFull, match=r"run\.dir is full"):
        cut_after(recorder.path, 1, 1, rest)
    assert sorted(folder.glob("journal.jsonl*")) == [recorder.path] and recorder.path.read_bytes() == before
