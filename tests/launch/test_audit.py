"""The audit of a run replays its journal and prints the account, or the line that does not verify."""

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import xxhash
from support.recorder import Recorder

from headrace.comm.messages import GroupId
from headrace.launch.audit import main
from headrace.relay.journal import events as ev
from headrace.relay.journal.files import JournalError, parts_of
from headrace.relay.journal.journal import Journal
from headrace.relay.journal.records import QueueIndex
from headrace.relay.journal.replay import pieces_of, verify
from headrace.relay.journal.snapshots import SavedState, places_at_beginnings, snapshots_of


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with one group, of which one row failed and one is leased."""
    journal, group = Journal(tmp_path / "journal.jsonl"), GroupId(0, 3)
    journal.append(ev.Opened(epoch=1, samples_per_prompt=2))
    journal.append(ev.Leased(group=group, samples=[0, 1], attempt=1, version=0, holder="rollout-0"))
    journal.append(ev.RowFailed(row=group.row(0), reason="the verifier hung"))
    journal.close()
    return tmp_path


def test_the_account_of_a_run_is_printed(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "leased=2 trained=0 evicted=0 filtered=0 failed=1 in_flight=1 holds=True" in out
    assert "to {'rollout-0': 2}" in out and "1 x failed: the verifier hung" in out


def test_an_illegal_event_is_named_with_its_line(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    with (run_dir / "journal.jsonl").open("ab") as file:
        file.write(b'{"event":"Trained","step":4}\n')
    assert main([str(run_dir)]) == 1
    assert "journal.jsonl:4: step 4" in capsys.readouterr().err


def test_an_audit_without_a_run_prints_its_usage(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert "arguments are required: RUN; --help lists the options" in capsys.readouterr().err


def test_help_and_a_folder_without_a_run_are_no_errors_of_a_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: ")
    assert main([str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err == f"headrace: error: {tmp_path} is not the folder of a run: it has no journal.jsonl\n"
    )


@pytest.fixture
def long_run(tmp_path: Path) -> Recorder:
    """A journal in four files, the second of which has two snapshots."""
    recorder = Recorder(tmp_path)
    for number in range(4):
        for _ in range(3):
            recorder.train_step(fails=number == 2)
        recorder.commit(ev.Checkpointed(step=recorder.state.step, path=f"step_{recorder.state.step}"))
        recorder.journal.part_bytes = 0 if number < 3 else math.inf
        recorder.journal.keep(recorder.state)
        recorder.journal.part_bytes = math.inf
    recorder.train_step()
    recorder.journal.close()
    assert len(parts_of(recorder.path)) == 4
    return recorder


def audited(recorder: Recorder, capsys: pytest.CaptureFixture[str], processes: int) -> tuple[int, str, str]:
    code = main([str(recorder.path.parent), "--processes", str(processes)])
    out, err = capsys.readouterr()
    return code, out, err


def test_processes_beside_each_other_give_the_account_of_one(long_run: Recorder, capsys: pytest.CaptureFixture[str]):
    assert len(pieces_of(long_run.path)) == 4
    one = audited(long_run, capsys, 1)
    assert one[0] == 0 and "'Trained': 13" in one[1] and "3 x failed: the verifier hung" in one[1]
    assert audited(long_run, capsys, 2) == one


@pytest.mark.parametrize(
    ("number", "before", "after"),
    [
        (1, b'"num_tokens":9', b'"num_tokens":8'),
        (1, b'"attempt":1', b'"attempt":9'),
        (2, b'"event":"Handed"', b'"event":"Hinded"'),
        (0, b'"step":1', b'"step":7'),
    ],
)
def test_a_file_in_the_middle_that_was_changed_is_refused_as_by_one_process(
    long_run: Recorder, capsys: pytest.CaptureFixture[str], number: int, before: bytes, after: bytes
):
    """Its lines may still be legal: then the snapshot after them is not the state that they make."""
    part = parts_of(long_run.path)[number]
    head, _, rest = (content := part.path.read_bytes()).partition(before)
    part.path.write_bytes(head + after + rest)
    assert len(content) == part.path.stat().st_size != len(head)
    one = audited(long_run, capsys, 1)
    assert one[0] == 1 and audited(long_run, capsys, 2) == one
    is_legal = after == b'"num_tokens":8'
    line = content[: len(head)].count(b"\n") + 1
    assert ("is not the state of the events before" if is_legal else f"{part.path.name}:{line}: ") in one[2]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_snapshot_that_is_not_the_state_of_the_events_before_it_is_refused(
    long_run: Recorder, capsys: pytest.CaptureFixture[str], number: int
):
    """The process that begins with it finds its own lines legal: the process of the lines before refuses it."""
    place, part = places_at_beginnings(long_run.path)[number], parts_of(long_run.path)[number + 1]
    ((_, state),) = snapshots_of(long_run.path, [place])
    state.tokens_trained += 1
    path = long_run.path.parent / "journal" / f"{place}.state"
    body = msgspec.msgpack.decode(path.read_bytes()[16:], type=SavedState)
    bare = replace(state, held={}, queue=QueueIndex(state.queue.needs))
    body = msgspec.msgpack.encode(msgspec.structs.replace(body, state=msgspec.Raw(msgspec.msgpack.encode(bare))))
    path.write_bytes(xxhash.xxh3_64_hexdigest(body).encode() + body)
    one = audited(long_run, capsys, 1)
    line = part.path.read_bytes()[: place - part.start].count(b"\n")
    assert one[0] == 1 and f"the snapshot after byte {place} is not the state" in one[2]
    assert one[2].endswith(f"up to {part.path}:{line}\n")
    assert audited(long_run, capsys, 2) == one


def test_a_piece_whose_snapshot_is_gone_is_not_taken_for_verified(long_run: Recorder):
    *_, (start, end), last = pieces_of(long_run.path)
    for place, piece in ((start, (start, end)), (end, last)):
        assert place is not None
        (long_run.path.parent / "journal" / f"{place}.state").unlink()
        with pytest.raises(JournalError, match="is gone"):
            verify(long_run.path, *piece)
    assert verify(long_run.path, 0, None) == long_run.state


def test_files_without_snapshots_of_this_program_are_verified_by_one_process(
    long_run: Recorder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    one = audited(long_run, capsys, 1)
    monkeypatch.setattr("headrace.relay.journal.snapshots.CODE", "another version")
    assert len(pieces_of(long_run.path)) == 1
    assert audited(long_run, capsys, 2)[:2] == one[:2]


def test_an_audit_by_no_process_is_a_mistake(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(run_dir), "--processes", "0"]) == 2
    assert "--processes: 0 is less than 1" in capsys.readouterr().err
