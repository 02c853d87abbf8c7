"""Saved weights: whole or not there, kept as long as they were wanted, and never outside of their folder."""

import time
from pathlib import Path

import pytest

from headrace.comm.errors import SettingError
from headrace.launch.serving.tinker.store import SAMPLERS, STATES, SavedPath, SavedWeights, TrainingRun

RUN = TrainingRun("abc:train:0", "model", 4, True, True, 1, 100.0)
PATH = SavedPath(RUN.run_id, STATES, "first")


@pytest.fixture
def store(tmp_path: Path) -> SavedWeights:
    store = SavedWeights(tmp_path / "saved")
    store.begin(RUN)
    return store


def write(store: SavedWeights, path: SavedPath = PATH, content: str = "x", ttl_s: int | None = None) -> None:
    def fill(folder: Path) -> None:
        (folder / "file").write_text(content)

    store.write(path, fill, 3, ttl_s, {"a": "b"})


def test_what_is_saved_is_found_by_its_path(store: SavedWeights):
    write(store)
    assert str(PATH) == "tinker://abc:train:0/weights/first" and SavedPath.parse(str(PATH)) == PATH
    assert (store.folder(PATH) / "file").read_text() == "x"
    saved = store.find(PATH)
    assert saved is not None and (saved.num_updates, saved.num_bytes, saved.user_metadata) == (3, 1, {"a": "b"})
    assert store.runs() == [RUN] and store.run(RUN.run_id) == RUN
    assert [path for path, _ in store.all(RUN.run_id)] == [PATH]


def test_a_name_that_is_taken_is_kept_unless_it_may_be_overwritten(store: SavedWeights):
    write(store)
    with pytest.raises(SettingError, match="path: tinker://abc:train:0/weights/first exists"):
        store.check_name(PATH)
    store.check_name(PATH, overwrite=True)
    write(store, content="y")
    assert (store.folder(PATH) / "file").read_text() == "y"


def test_an_error_leaves_what_was_there(store: SavedWeights):
    write(store)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("h")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        store.write(PATH, fail, 4, None, None)
    assert (store.folder(PATH) / "file").read_text() == "x"
    assert [path.name for path in store.folder(PATH).parent.iterdir()] == ["first"]


def test_weights_whose_time_is_over_are_gone(store: SavedWeights, monkeypatch: pytest.MonkeyPatch):
    write(store, ttl_s=10)
    later = time.time() + 11
    monkeypatch.setattr(time, "time", lambda: later)
    assert store.find(PATH) is None and list(store.all(RUN.run_id)) == []
    store.check_name(PATH)
    store.remove_expired()
    assert not (store.root / RUN.run_id / STATES / "first").exists()


def test_removed_weights_are_gone(store: SavedWeights):
    write(store)
    store.remove(PATH)
    with pytest.raises(SettingError, match="there is no tinker://"):
        store.remove(PATH)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a b", "x" * 201, "ä"])
def test_a_name_is_no_path(store: SavedWeights, name: str):
    with pytest.raises(SettingError):
        store.check_name(SavedPath(RUN.run_id, SAMPLERS, name))


@pytest.mark.parametrize("run_id", ["..", ".", "", "a/b:train:0", "abc:train:x", "../abc:train:0"])
def test_the_id_of_a_run_is_no_path(store: SavedWeights, run_id: str):
    for call in (
        store.run,
        lambda run: list(store.all(run)),
        lambda run: store.remove(SavedPath(run, STATES, "first")),
    ):
        with pytest.raises(SettingError, match="is not on this server"):
            call(run_id)


@pytest.mark.parametrize("text", ["weights/a", "tinker://a/b", "tinker://a/b/c/d", "tinker://a/external_weights/c"])
def test_a_path_of_another_form_is_refused(text: str):
    with pytest.raises(SettingError, match="is not tinker://RUN_ID/weights/NAME"):
        SavedPath.parse(text)


def test_half_of_a_folder_is_nothing(store: SavedWeights):
    write(store)
    (store.folder(PATH) / "saved.json").write_text("{")
    assert store.find(PATH) is None
