"""What is kept on the disk is whole or not there, whenever the power is cut, and damage is seen."""

from pathlib import Path

import pytest
from support.closing import at_end
from support.power_cut import PowerCuts

from headrace.comm.errors import SettingError
from headrace.launch.serving.tinker.kept import KeptRequest, KeptResult, KeptScripts, KeptSession

SESSION = KeptSession("s", {"a": "b"}, "name", {"s:sample:0": None})
MODEL = "s:train:0"
REQUEST = KeptRequest("optim_step", b"raw" * 1000)
RESULT = KeptResult(REQUEST.digest, "application/json", b"{}", "wrong", is_performed=False)


@pytest.fixture
def scripts(tmp_path: Path) -> KeptScripts:
    return opened(tmp_path)


def opened(root: Path) -> KeptScripts:
    scripts = KeptScripts(root)
    at_end(scripts.close)
    return scripts


def test_what_was_written_is_read(scripts: KeptScripts):
    scripts.write_session(SESSION)
    scripts.write_request(MODEL, 3, REQUEST)
    scripts.write_result(MODEL, 3, RESULT, is_synced=False)
    assert [session for session, _ in scripts.sessions()] == [SESSION]
    assert scripts.models("s") == [MODEL]
    assert scripts.numbers(MODEL) == ({3}, {3})
    assert scripts.request(MODEL, 3) == REQUEST and scripts.result(MODEL, 3) == RESULT
    assert scripts.result(MODEL, 4) is None
    assert [scripts.count_try(MODEL, 3) for _ in range(3)] == [1, 2, 3]


def test_a_request_is_on_the_disk_when_it_was_written_and_never_in_part(tmp_path: Path):
    root = tmp_path / "root"
    root.mkdir()
    scripts = opened(root)
    scripts.write_session(SESSION)
    cuts = PowerCuts(root, tmp_path / "cuts")
    with cuts:
        scripts.write_request(MODEL, 3, REQUEST)
    assert not cuts.lost_names() and len(cuts.left) > 6
    found: list[bool] = []
    for folder in cuts.left:
        left = opened(folder)
        assert [session for session, _ in left.sessions()] == [SESSION]
        found.append(left.numbers(MODEL)[0] == {3})
        assert not found[-1] or left.request(MODEL, 3) == REQUEST
    assert found[-2:] == [True, True] and not found[0]


def test_results_are_on_the_disk_before_their_requests_go(tmp_path: Path):
    root = tmp_path / "root"
    root.mkdir()
    scripts = opened(root)
    scripts.write_session(SESSION)
    for number in range(4):
        scripts.write_request(MODEL, number, REQUEST)
        scripts.write_result(MODEL, number, RESULT, is_synced=False)
    scripts.note_fetched(MODEL, 1)
    cuts = PowerCuts(root, tmp_path / "cuts")
    with cuts:
        scripts.sync_results(MODEL)
        scripts.prune(MODEL, 3, 0.0)
    for folder in cuts.left:
        left = opened(folder)
        requests, _ = left.numbers(MODEL)
        for number in {0, 2, 3} - requests:
            assert left.result(MODEL, number) == RESULT
    assert scripts.numbers(MODEL) == ({3}, {0, 2, 3})


@pytest.mark.parametrize("place", [0, 20, -1])
def test_damage_is_seen(place: int, scripts: KeptScripts):
    scripts.write_session(SESSION)
    scripts.write_request(MODEL, 3, REQUEST)
    scripts.write_result(MODEL, 3, RESULT, is_synced=True)
    for name in ("3.request", "3.result"):
        file = scripts.folder(MODEL) / name
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        file.write_bytes(content)
    with pytest.raises(SettingError, match="request 3 of s:train:0 is damaged on the disk"):
        scripts.request(MODEL, 3)
    assert scripts.result(MODEL, 3) is None


def test_a_session_that_has_ended_is_removed_by_the_next_server(scripts: KeptScripts):
    scripts.write_session(SESSION)
    scripts.write_request(MODEL, 3, REQUEST)
    scripts.end_session("s")
    assert not [*scripts.sessions()] and not scripts.folder(MODEL).exists()
