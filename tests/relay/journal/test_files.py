"""The files of a journal are one history, whatever happens to one of them, and no line of it is ever deleted."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.recorder import Recorder

from headrace.relay.journal import events as ev
from headrace.relay.journal import files
from headrace.relay.journal.cutting import cut_after, steps_in
from headrace.relay.journal.files import JournalError, named_by_place, parts_of, read_events
from headrace.relay.journal.journal import Journal
from headrace.relay.journal.replay import recover, replay


@pytest.fixture
def recorder(tmp_path: Path):
    recorder = Recorder(tmp_path)
    yield recorder
    recorder.journal.close()


def continue_journal(recorder: Recorder) -> None:
    """Begin another file now."""
    before, recorder.journal.part_bytes = recorder.journal.part_bytes, 0
    recorder.journal.keep(recorder.state)
    recorder.journal.part_bytes = before


def long_journal(recorder: Recorder, num_files: int = 3) -> None:
    for _ in range(num_files - 1):
        recorder.train_step()
        recorder.train_step()
        recorder.commit(ev.Checkpointed(step=recorder.state.step, path="step"))
        continue_journal(recorder)
    recorder.train_step()


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_cut_where_one_file_ends_and_the_next_begins_keeps_all_lines_before(recorder: Recorder, step: int):
    for _ in range(4):
        recorder.train_step()
        continue_journal(recorder)
    recorder.journal.close()
    place, rest = steps_in(recorder.path).places[step], recorder.path.with_name("rest")
    assert place in [part.end for part in parts_of(recorder.path)]
    cut_after(recorder.path, step, None, rest)
    assert steps_in(recorder.path).num_trained == step and parts_of(recorder.path)[-1].end == place
    Journal(recorder.path).close()
    assert recover(recorder.path).step == step == replay(recorder.path).step


@pytest.mark.parametrize("at", [12, 2, 0, 40])
def test_a_damaged_first_line_is_refused_by_name_and_nothing_is_removed(recorder: Recorder, at: int):
    long_journal(recorder)
    recorder.journal.close()
    content = bytearray(recorder.path.read_bytes())
    content[at] = 0
    recorder.path.write_bytes(content)
    before = {path: path.read_bytes() for path in recorder.path.parent.rglob("*.jsonl")}
    for use in (Journal, replay, recover):
        with pytest.raises(JournalError, match=r"journal\.jsonl:1: "):
            use(recorder.path)
    assert "journal.jsonl:1: " in steps_in(recorder.path).problem
    assert {path: path.read_bytes() for path in recorder.path.parent.rglob("*.jsonl")} == before


@pytest.mark.parametrize("content", [None, b"", b'{"event":"Conti'])
def test_an_empty_newest_file_is_refused_while_there_are_older_ones(recorder: Recorder, content: bytes | None):
    long_journal(recorder)
    recorder.journal.close()
    older = [part.path for part in parts_of(recorder.path)[:-1]]
    recorder.path.unlink() if content is None else recorder.path.write_bytes(content)
    for use in (Journal, replay, recover):
        with pytest.raises(JournalError, match=r"journal\.jsonl has no whole line"):
            use(recorder.path)
    assert "has no whole line" in steps_in(recorder.path).problem
    assert all(path.exists() for path in older)
    assert recorder.path.read_bytes() == (content or b"")


def test_files_that_are_given_up_for_an_older_copy_are_kept_under_other_names(recorder: Recorder):
    long_journal(recorder)
    recorder.journal.close()
    parts = parts_of(recorder.path)
    contents = [part.path.read_bytes() for part in parts[:-1]]
    backup = contents[0][: contents[0].rindex(b'{"event":"Trained"')]
    for number in (1, 2):
        recorder.path.write_bytes(backup)
        Journal(recorder.path).close()
        assert replay(recorder.path).step == 1 and len(parts_of(recorder.path)) == 1
        aside = [part.path.with_name(f"{part.path.name}.discarded-{number}") for part in parts[:-1]]
        assert [path.read_bytes() for path in aside] == contents
        for part, content in zip(parts, contents, strict=False):  # restored once more
            part.path.write_bytes(content)


def test_a_reader_goes_on_while_the_hub_begins_another_file(recorder: Recorder, monkeypatch: pytest.MonkeyPatch):
    """Whenever that is: the file that it was about to open has another name then."""
    long_journal(recorder)
    expected = [event for _, event in read_events(recorder.path)]
    is_due, find_parts = True, files.parts_of

    def find_and_continue(journal: Path) -> list[files.Part]:
        nonlocal is_due
        parts = find_parts(journal)
        if is_due:
            is_due = False
            continue_journal(recorder)
            recorder.train_step()
        return parts

    monkeypatch.setattr(files, "parts_of", find_and_continue)
    assert [event for _, event in read_events(recorder.path)] == expected
    is_due = True
    assert replay(recorder.path) in (recorder.state, recover(recorder.path))


def test_an_error_after_the_files_have_changed_names_leaves_the_writer_in_the_newest(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
):
    recorder.train_step()
    replace = Path.replace

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def replace_and_fill(path: Path, target: Path) -> Path:
        if target == recorder.path:
            monkeypatch.setattr("headrace.relay.journal.journal.sync_folder", refuse)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replace_and_fill)
    continue_journal(recorder)
    monkeypatch.undo()
    assert len(parts_of(recorder.path)) == 2
    recorder.train_step()
    recorder.commit(ev.Checkpointed(step=2, path="step_2"))
    assert replay(recorder.path) == recorder.state == recover(recorder.path)


def refuse_with(number: int) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE, errno.ENOSPC])
@pytest.mark.parametrize("call", ["os.link", "pathlib.Path.write_bytes", "pathlib.Path.replace", "pathlib.Path.mkdir"])
def test_the_run_goes_on_without_a_snapshot_or_another_file(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, number: int
):
    recorder.train_step()
    monkeypatch.setattr(call, refuse_with(number))
    continue_journal(recorder)
    recorder.train_step()
    recorder.commit(ev.Checkpointed(step=2, path="step_2"))
    monkeypatch.undo()
    assert os.strerror(number) in caplog.text
    assert sorted(path.name for path in recorder.path.parent.iterdir()) in (
        ["journal.jsonl"],
        ["journal", "journal.jsonl"],
    )
    recorder.journal.close()
    assert recover(recorder.path) == recorder.state == replay(recorder.path)
    recorder.journal = Journal(recorder.path)
    continue_journal(recorder)
    recorder.train_step()
    assert replay(recorder.path) == recorder.state == recover(recorder.path) and len(parts_of(recorder.path)) == 2


def test_a_file_in_the_place_of_the_folder_costs_the_snapshots_alone(recorder: Recorder, caplog):
    recorder.path.with_suffix("").write_text("mine")
    recorder.train_step()
    continue_journal(recorder)
    recorder.journal.close()
    recorder.journal = Journal(recorder.path)
    continue_journal(recorder)
    assert "no snapshot" in caplog.text and recover(recorder.path) == recorder.state


def test_a_full_disk_that_ends_the_run_has_no_snapshots_and_no_other_file(recorder: Recorder):
    recorder.train_step()
    recorder.journal.full = "run.dir is full"
    recorder.journal.tail_bytes = 1
    before = recorder.path.stat().st_ino
    continue_journal(recorder)
    recorder.train_step()
    assert recorder.path.stat().st_ino == before and not named_by_place(recorder.path, "state")
    assert not recorder.journal.needs_snapshot(ev.Trained(step=9))


def test_a_file_that_was_begun_after_other_lines_is_not_continued_by_the_next_one(recorder: Recorder):
    """As after one of them was changed by hand: each line is legal, and the audit names both files."""
    long_journal(recorder)
    first, second, _ = parts_of(recorder.path)
    first.path.write_bytes(first.path.read_bytes().replace(b'"reward":0.5', b'"reward":0.7'))
    for path in named_by_place(recorder.path, "state").values():
        path.unlink()
    with pytest.raises(
        JournalError, match=rf"{second.path.name} was begun after other lines than those of .*{first.path.name}"
    ):
        replay(recorder.path)


def test_a_journal_that_was_set_aside_with_its_folder_is_whole(recorder: Recorder):
    long_journal(recorder)
    recorder.journal.close()
    aside = recorder.path.rename(recorder.path.with_name("journal.jsonl.discarded-1"))
    recorder.path.with_name("journal").rename(recorder.path.with_name("journal.discarded-1"))
    assert replay(aside) == recorder.state


def test_what_a_hub_left_that_died_while_it_wrote_a_snapshot_is_taken_away(recorder: Recorder):
    long_journal(recorder)
    recorder.journal.close()
    (left := recorder.path.with_suffix("") / "snapshot.new").write_bytes(b"half of it")
    Journal(recorder.path).close()
    assert not left.exists()


def test_the_lines_of_steps_are_known_as_far_as_the_next_hub_reads_them(recorder: Recorder, monkeypatch):
    """Damage before a snapshot that the hub does not use is damage for the hub."""
    long_journal(recorder)
    recorder.commit(ev.Checkpointed(step=5, path="step_5"))
    recorder.journal.close()
    first = parts_of(recorder.path)[0].path
    lines = first.read_bytes().splitlines(keepends=True)
    lines[1] = b"x" * (len(lines[1]) - 1) + b"\n"
    first.write_bytes(b"".join(lines))
    assert steps_in(recorder.path).checkpoints == {2, 4, 5} and recover(recorder.path) == recorder.state
    monkeypatch.setattr("headrace.relay.journal.snapshots.CODE", "another version")
    known = steps_in(recorder.path)
    assert not known.checkpoints and f"{first.name}:2: " in known.problem
    with pytest.raises(JournalError, match=rf"{first.name}:2: "):
        recover(recorder.path)


def test_a_missing_file_is_named_as_the_reason_why_no_step_is_known(recorder: Recorder):
    long_journal(recorder)
    recorder.journal.close()
    parts_of(recorder.path)[0].path.unlink()
    known = steps_in(recorder.path)
    assert not known.num_trained and "the file that begins with byte 0 of the journal is missing" in known.problem
