"""A snapshot and the events after it give the state of all events, or it is not used."""

import logging
import random
from dataclasses import make_dataclass
from pathlib import Path

import msgspec
import pytest
import xxhash
from support.power_cut import PowerCuts
from support.recorder import Recorder
from support.small_disk import fill, small_disk

from headrace.relay.journal import events as ev
from headrace.relay.journal import snapshots
from headrace.relay.journal.cutting import cut_after, steps_in
from headrace.relay.journal.files import JournalError, named_by_place, parts_of, read_events
from headrace.relay.journal.hub_state import HubState
from headrace.relay.journal.journal import Journal
from headrace.relay.journal.replay import recover, replay
from headrace.relay.journal.snapshots import CODE, code_digest, snapshots_of, write_snapshot


@pytest.fixture
def recorder(tmp_path: Path):
    recorder = Recorder(tmp_path)
    yield recorder
    recorder.journal.close()


def snapshot_files(recorder: Recorder) -> list[Path]:
    return [*named_by_place(recorder.path, "state").values()]


def newest_place(recorder: Recorder) -> int:
    return max(named_by_place(recorder.path, "state"))


def train(recorder: Recorder, num_steps: int, checkpoint_every: int = 2) -> None:
    for _ in range(num_steps):
        recorder.train_step(fails=recorder.state.step % 3 == 0)
        if recorder.state.step % checkpoint_every == 0:
            recorder.commit(ev.Checkpointed(step=recorder.state.step, path=f"step_{recorder.state.step}"))


def test_the_next_hub_folds_the_events_after_the_newest_snapshot_alone(recorder: Recorder, monkeypatch):
    train(recorder, 5)
    places = [*named_by_place(recorder.path, "state")]
    applied = []
    monkeypatch.setattr("headrace.relay.journal.replay.fold", lambda events, state: applied.extend(events))
    recover(recorder.path)
    assert applied == [event for _, event in read_events(recorder.path, places[-1])] and len(applied) == 7
    assert len(places) == 2, "one more is kept, in case the newest is torn"


def test_a_long_tail_has_a_snapshot_without_a_checkpoint(recorder: Recorder):
    recorder.journal.tail_bytes = 1000
    for _ in range(20):
        recorder.train_step()
    assert 0 < recorder.path.stat().st_size - newest_place(recorder) < 1200
    assert recover(recorder.path) == recorder.state


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_snapshot_is_never_used(recorder: Recorder, seed: int, caplog: pytest.LogCaptureFixture):
    train(recorder, 5)
    drawn, (older, newest) = random.Random(seed), snapshot_files(recorder)
    content = bytearray(newest.read_bytes())
    if seed % 2:
        content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
    else:
        del content[drawn.randrange(len(content)) :]
    newest.write_bytes(content)
    assert [place for place, _ in snapshots_of(recorder.path)] == [int(older.stem)]
    assert recover(recorder.path) == recorder.state == replay(recorder.path)
    assert "torn" in caplog.text
    older.write_bytes(b"")
    assert recover(recorder.path) == recorder.state


def test_a_snapshot_of_another_version_of_the_program_is_not_used(recorder: Recorder, monkeypatch, caplog):
    train(recorder, 5)
    monkeypatch.setattr(snapshots, "CODE", "other")
    assert not [*snapshots_of(recorder.path)] and recover(recorder.path) == recorder.state
    assert "another version" in caplog.text
    recorder.journal.close()
    recorder.journal, recorder.journal.tail_bytes = Journal(recorder.path), 1000
    recorder.commit(ev.Drained(member="rollout-0"))
    assert [place for place, _ in snapshots_of(recorder.path)] == [recorder.path.stat().st_size], (
        "and soon there is one"
    )


def test_the_version_of_the_program_is_the_fields_of_the_state_and_the_bytes_of_the_files_that_make_it(monkeypatch):
    read = Path.read_bytes
    for name in ("state.py", "records.py", "window.py", "base.py"):
        changed = lambda path, name=name: read(path) + b"#" * (path.name == name)
        monkeypatch.setattr(Path, "read_bytes", changed)
        assert code_digest() != CODE, name
    monkeypatch.undo()
    monkeypatch.setattr(snapshots, "HubState", make_dataclass("HubState", [("more", int, 0)], bases=(HubState,)))
    assert code_digest() != CODE
    monkeypatch.undo()
    assert code_digest() == CODE


def test_a_snapshot_has_the_version_of_the_program_that_made_it_whatever_the_files_are_by_then(
    recorder: Recorder, monkeypatch
):
    """As after an update of the files while the hub runs: another process reads the new ones."""
    read = Path.read_bytes
    with monkeypatch.context() as updated:
        updated.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.suffix == ".py"))
        train(recorder, 2)
    assert [place for place, _ in snapshots_of(recorder.path)] == [newest_place(recorder)]


@pytest.mark.parametrize(
    "change", [{"version": None, "window": None}, {"more": 1}, {"step": "seven"}, {"staleness": None}]
)
def test_a_whole_snapshot_of_another_state_is_not_used(recorder: Recorder, change: dict[str, object], caplog):
    """Neither by the next hub nor by the audit: the events give the state."""
    train(recorder, 4)
    path = snapshot_files(recorder)[-1]
    saved = msgspec.msgpack.decode(path.read_bytes()[16:], type=snapshots.SavedState)
    fields = msgspec.msgpack.decode(saved.state) | change
    bare = msgspec.msgpack.encode(
        {name: value for name, value in fields.items() if value is not None or name not in change}
    )
    body = msgspec.msgpack.encode(msgspec.structs.replace(saved, state=msgspec.Raw(bare)))
    path.write_bytes(xxhash.xxh3_64_hexdigest(body).encode() + body)
    assert recover(recorder.path) == recorder.state == replay(recorder.path)
    assert f"{path} is not used" in caplog.text


def test_a_snapshot_that_a_hub_removes_meanwhile_is_passed_over(recorder: Recorder, caplog):
    train(recorder, 4)
    found = snapshots_of(recorder.path)
    next(found)
    snapshot_files(recorder)[0].unlink()
    assert not [*found] and not caplog.text


def test_damage_in_the_last_lines_is_not_blamed_on_the_snapshots(recorder: Recorder, caplog):
    train(recorder, 5)
    with recorder.path.open("ab") as file:
        file.write(b"\0\0\n")
    with pytest.raises(JournalError, match=r"journal\.jsonl:\d+: "):
        recover(recorder.path)
    assert not caplog.text


def test_a_snapshot_of_other_lines_is_not_used(recorder: Recorder):
    """As after a journal was cut by hand, or the snapshot came from another folder."""
    train(recorder, 4)
    lines = recorder.path.read_bytes()
    recorder.path.write_bytes(lines.replace(b'"reward":0.5', b'"reward":0.7'))
    assert not [*snapshots_of(recorder.path)] and recover(recorder.path) == replay(recorder.path)
    recorder.path.write_bytes(lines[: lines.index(b"\n") + 1])
    assert recover(recorder.path).step == 0


def test_events_that_do_not_follow_from_a_snapshot_are_folded_from_the_start(recorder: Recorder, caplog):
    train(recorder, 3)
    wrong = recover(recorder.path)
    wrong.step = 7
    write_snapshot(recorder.path, newest_place(recorder), wrong)
    assert recover(recorder.path) == recorder.state and "is not used" in caplog.text
    with pytest.raises(JournalError, match="is not the state of the events before"):
        replay(recorder.path)


def test_a_snapshot_is_of_its_moment(recorder: Recorder):
    """Later events change no object of a state that was read from it twice."""
    train(recorder, 2)
    ((place, first),), ((_, second),) = snapshots_of(recorder.path), snapshots_of(recorder.path)
    assert first == second
    recorder.train_step()
    for _, event in read_events(recorder.path, place):
        snapshots_apply(event, first)
    assert first == recorder.state != second


def snapshots_apply(event: ev.Event, state) -> None:
    from headrace.relay.journal.state import apply  # the rule, by its own name

    apply(event, state)


def long_journal(recorder: Recorder, num_steps: int = 12) -> None:
    recorder.journal.part_bytes = 1500
    train(recorder, num_steps)


def test_a_long_journal_is_in_several_files_which_are_one_history(recorder: Recorder):
    long_journal(recorder)
    parts = parts_of(recorder.path)
    assert len(parts) > 3 and parts[-1].path == recorder.path
    assert [part.end for part in parts[:-1]] == [part.start for part in parts[1:]]
    assert replay(recorder.path) == recorder.state == recover(recorder.path)
    kinds = {type(event) for _, event in read_events(recorder.path)}
    assert ev.Trained in kinds and ev.Continued not in kinds
    trained = [
        event.step for _, event in read_events(recorder.path, kinds=(ev.Trained,)) if isinstance(event, ev.Trained)
    ]
    assert trained == list(range(12))
    places = [place for place, _ in read_events(recorder.path)]
    assert [place for place, _ in read_events(recorder.path, places[30])] == places[31:]
    assert [place for place, _ in read_events(recorder.path, places[30], places[60])] == places[31:61]


def test_the_next_hub_needs_no_older_file_and_the_audit_names_a_missing_one(recorder: Recorder):
    long_journal(recorder)
    gone = parts_of(recorder.path)[1]
    gone.path.unlink()
    assert recover(recorder.path) == recorder.state
    with pytest.raises(JournalError, match=f"begins with byte {gone.start} of the journal is missing"):
        replay(recorder.path)


def test_an_error_names_the_file_and_the_line_in_it(recorder: Recorder):
    long_journal(recorder)
    part = parts_of(recorder.path)[1]
    lines = part.path.read_bytes().splitlines(keepends=True)
    lines[3] = b"{" + b" " * (len(lines[3]) - 2) + b"\n"
    part.path.write_bytes(b"".join(lines))
    with pytest.raises(JournalError, match=rf"journal/{part.start}\.jsonl:4: "):
        replay(recorder.path)


def test_a_journal_in_several_files_has_one_writer(recorder: Recorder):
    long_journal(recorder)
    assert Journal.is_in_use(recorder.path)
    with pytest.raises(JournalError, match="in use by another process"):
        Journal(recorder.path)
    recorder.journal.close()
    assert not Journal.is_in_use(recorder.path)
    journal = Journal(recorder.path)
    opened = ev.Opened(epoch=2, samples_per_prompt=2)
    journal.append(opened)
    journal.close()
    assert replay(recorder.path).epoch == 2 == recover(recorder.path).epoch


def test_a_power_cut_or_a_kill_between_two_files_loses_no_event(tmp_path: Path):
    (tmp_path / "run").mkdir()
    recorder = Recorder(tmp_path / "run")
    train(recorder, 5)
    recorder.journal.part_bytes = 1500
    with PowerCuts(tmp_path / "run", tmp_path / "cuts") as cuts:
        recorder.commit(ev.Checkpointed(step=5, path="step_5"))
    assert len(parts_of(recorder.path)) == 2, "another file was begun meanwhile"
    recorder.journal.close()
    assert len(cuts.left) > 20
    before, lost = recorder.state.checkpointed, cuts.lost_names()
    assert {path.suffix for path in lost} <= {".state"}, "a snapshot alone may lose its name"
    for left in cuts.left:
        journal = Journal(left / "journal.jsonl")
        state = recover(left / "journal.jsonl")
        assert state == replay(left / "journal.jsonl") and state.step == 5, left
        assert state.checkpointed in (4, before), left
        journal.append(ev.Opened(epoch=2, samples_per_prompt=2))
        journal.part_bytes = 0
        journal.keep(recover(left / "journal.jsonl"))
        journal.close()
        assert recover(left / "journal.jsonl") == replay(left / "journal.jsonl"), left


@pytest.mark.parametrize("step", [2, 5, 11])
def test_a_resumed_run_cuts_a_journal_in_several_files_where_it_continues(tmp_path: Path, step: int):
    (tmp_path / "run").mkdir()
    recorder = Recorder(tmp_path / "run")
    long_journal(recorder)
    recorder.journal.close()
    lines = b"".join(part.path.read_bytes() for part in parts_of(recorder.path))
    place, rest = steps_in(recorder.path).places[step], tmp_path / "run/rest"
    with PowerCuts(tmp_path / "run", tmp_path / "cuts") as cuts:
        cut_after(recorder.path, step, None, rest)
    for run in (tmp_path / "run", *cuts.left):
        state = recover(run / "journal.jsonl")
        assert state == replay(run / "journal.jsonl") and state.step in (step, 12), run
    assert recover(recorder.path).step == step and parts_of(recorder.path)[-1].end == place
    assert rest.read_bytes() == lines[place:], "what is given up is kept"
    assert all(end <= place for end in named_by_place(recorder.path, "state"))
    journal = Journal(recorder.path)
    journal.append(ev.Opened(epoch=2, samples_per_prompt=2))
    journal.close()
    assert recover(recorder.path) == replay(recorder.path)


def test_a_journal_is_cut_where_one_of_its_files_ends(recorder: Recorder):
    recorder.journal.part_bytes = 0
    for _ in range(3):
        recorder.train_step()
        recorder.journal.keep(recorder.state)
    ends = [part.end for part in parts_of(recorder.path)]
    recorder.journal.close()
    assert steps_in(recorder.path).places[2] in ends
    cut_after(recorder.path, 2, None, recorder.path.with_name("rest"))
    assert replay(recorder.path) == recover(recorder.path) and recover(recorder.path).step == 2
    assert next(event for _, event in read_events(recorder.path)) == ev.Opened(epoch=1, samples_per_prompt=2)


def test_on_a_full_disk_there_is_no_snapshot_and_the_journal_continues(tmp_path: Path, caplog):
    with small_disk(tmp_path / "disk", megabytes=3) as disk:
        recorder = Recorder(disk)
        train(recorder, 4)
        recorder.journal.part_bytes = 0
        room = fill(disk)
        recorder.journal.keep(recorder.state)
        assert "no snapshot" in caplog.text and len(parts_of(recorder.path)) == 1
        del room
        assert recover(recorder.path) == recorder.state == replay(recorder.path)
        recorder.journal.close()


def test_a_file_system_without_second_names_keeps_one_file(recorder: Recorder, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    long_journal(recorder)
    assert len(parts_of(recorder.path)) == 1 and recover(recorder.path) == recorder.state
    assert (
        caplog.text.count("not continued in other files") == 1
        and not recorder.path.with_name("journal.jsonl.new").exists()
    )


def test_a_file_that_was_begun_by_a_hub_that_died_is_taken_away(recorder: Recorder):
    """The older file has its second name already, and the newer one has not taken the first."""
    train(recorder, 2)
    folder = recorder.path.with_suffix("")
    (folder / "0.jsonl").hardlink_to(recorder.path)
    (folder / "999999.state").write_bytes(b"of steps that were given up")
    assert replay(recorder.path) == recorder.state, "it is not part of the history"
    recorder.journal.close()
    Journal(recorder.path).close()
    assert sorted(path.suffix for path in folder.iterdir()) == [".state"]


def test_a_snapshot_that_counts_is_used_without_a_word(recorder: Recorder, caplog):
    train(recorder, 2)
    caplog.set_level(logging.WARNING)
    assert recover(recorder.path) == recorder.state and not caplog.text
