"""A server that is killed, and started again on its folder and port, goes on: scripts notice nothing, and get the same numbers bit by bit."""

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bench.faults.failpoints import Hit, held_at
from support.policies import tiny_policy
from support.tinker_client import PATIENCE_S, Client, loss_body, sample_body, serve
from support.tinker_script import KilledServer, PatientClient, script

from headrace.comm.errors import SettingError
from headrace.comm.trace import FAILPOINTS
from headrace.launch.serving.tinker import checkpoints, kept, sessions, work


class Script:
    """A script in a thread."""

    def __init__(self, server: KilledServer) -> None:
        self.found: list[Any] = []
        self._problem: BaseException | None = None
        self._server = server
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.found = script(PatientClient(self._server.port))
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self._problem = error

    def result(self) -> list[Any]:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the script has not ended"
        if self._problem is not None:
            raise self._problem
        return self.found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The results of the script without a kill."""
    server = KilledServer(model, tmp_path_factory.mktemp("whole"))
    return Script(server).result()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_kills_at_any_time_change_no_result(seed: int, model: Path, whole: list[Any], tmp_path: Path):
    server = KilledServer(model, tmp_path / "saved")
    draw = random.Random(seed)
    running = Script(server)
    for _ in range(6):
        running.thread.join(draw.uniform(0.05, 0.8))
        server.restart()
    assert running.result() == whole


@pytest.mark.parametrize("point", ["request kept", "request done", "seal"])
def test_a_kill_at_this_point_changes_no_result(
    point: str, model: Path, whole: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    address = tmp_path / "points"
    monkeypatch.setenv(FAILPOINTS, str(address))
    server = KilledServer(model, tmp_path / "saved")
    running = Script(server)
    for number in (3, 9, 21, 30):
        is_wanted = partial(_is_there, point, number)
        with held_at(address, is_wanted, PATIENCE_S) as hit:
            assert hit is not None
            os.kill(hit.pid, signal.SIGKILL)
        server.restart()
    assert running.result() == whole


Damage = Callable[[Path], None]
"""What happens to the folder of a model between two servers."""


def newest_checkpoint(folder: Path) -> Path:
    whole = (path.parent for path in folder.glob("checkpoints/step_*/manifest.json"))
    return max(whole, key=lambda path: int(path.name.removeprefix("step_")))


def flip(file: Path) -> None:
    """Damage a file in its middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def newest(folder: Path, kind: str) -> Path:
    return max(folder.glob(f"*.{kind}"), key=lambda file: int(file.stem))


def damage_checkpoint(folder: Path) -> None:
    flip(max((newest_checkpoint(folder) / "dcp").iterdir(), key=lambda file: file.stat().st_size))


def damage_weights(folder: Path) -> None:
    flip(next((newest_checkpoint(folder) / "samplers").iterdir()))


def leave_half_a_checkpoint(folder: Path) -> None:
    (newest_checkpoint(folder) / "manifest.json").unlink()


def damage_result(folder: Path) -> None:
    flip(newest(folder, "result"))


def leave_half_a_result(folder: Path) -> None:
    file = newest(folder, "result")
    file.write_bytes(file.read_bytes()[:9])


def lose_a_result(folder: Path) -> None:
    newest(folder, "result").unlink()


def leave_half_a_request(folder: Path) -> None:
    (folder / f"{int(newest(folder, 'request').stem) + 1}.request.new").write_bytes(b"half")


def killed_in_a_checkpoint(server: KilledServer, address: Path) -> Path:
    """Kill a server while it writes a later checkpoint; returns the folder of its model."""
    with held_at(address, partial(_is_there, "seal", 26), PATIENCE_S) as hit:
        assert hit is not None
        os.kill(hit.pid, signal.SIGKILL)
    server.kill()
    (folder,) = server.folder.glob("recovery/*/*:train:0")
    return folder


@pytest.mark.parametrize(
    "damage",
    [
        damage_checkpoint, damage_weights, leave_half_a_checkpoint, damage_result, leave_half_a_result, lose_a_result,
        leave_half_a_request,
    ],
)  # fmt: skip
def test_damage_changes_no_result(
    damage: Damage, model: Path, whole: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(FAILPOINTS, str(tmp_path / "points"))
    server = KilledServer(model, tmp_path / "saved")
    running = Script(server)
    damage(killed_in_a_checkpoint(server, tmp_path / "points"))
    server.start()
    assert running.result() == whole


def damage_request(folder: Path) -> None:
    flip(newest(folder, "result").with_suffix(".request"))


def lose_a_request(folder: Path) -> None:
    newest(folder, "result").with_suffix(".request").unlink()


def damage_all_checkpoints(folder: Path) -> None:
    for checkpoint in folder.glob("checkpoints/step_*"):
        flip(checkpoint / "samplers.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_request, "is damaged on the disk"),
        (lose_a_request, "is not on the disk any more"),
        (damage_all_checkpoints, "is not on the disk any more"),
    ],
)
def test_what_cannot_be_computed_again_is_told(
    damage: Damage, message: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(FAILPOINTS, str(tmp_path / "points"))
    server = KilledServer(model, tmp_path / "saved")
    running = Script(server)
    damage(killed_in_a_checkpoint(server, tmp_path / "points"))
    server.start()
    with pytest.raises(AssertionError, match=message):
        running.result()


def test_a_request_that_ends_each_server_fails_at_last(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    address = tmp_path / "points"
    monkeypatch.setenv(FAILPOINTS, str(address))
    server = KilledServer(model, tmp_path / "saved")
    client = PatientClient(server.port)
    name = client.begin()
    first = client.loss(name, 1)
    client.result(first)
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(client.result(client.loss(name, 2))))
    asking.start()
    for _ in range(3):
        with held_at(address, partial(_is_there, "request done", 2), PATIENCE_S) as hit:
            assert hit is not None
            os.kill(hit.pid, signal.SIGKILL)
        server.restart()
    asking.join(PATIENCE_S)
    assert "the server has ended 3 times while it carried out this request" in found[0]["error"]
    assert "no weight is changed: the server has ended 3 times" in client.result(client.step(name, 3))["error"]
    client.loss(name, 4)
    server.restart()  # what was given up is not begun again
    assert client.result(client.step(name, 5))["metrics"]["grad_norm"] > 0


# ------------------------------------------------------------------------------------------ servers in this process


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Callable[..., Client]:
    return lambda **options: serve(model, tmp_path / "saved", **options)


def requests_of(model_id: str, folder: Path) -> list[int]:
    return sorted(int(file.stem) for file in folder.glob(f"saved/recovery/*/{model_id}/*.request"))


def results_of(model_id: str, folder: Path) -> list[int]:
    return sorted(int(file.stem) for file in folder.glob(f"saved/recovery/*/{model_id}/*.result"))


def test_requests_that_no_checkpoint_needs_are_removed_and_results_once_they_were_fetched(
    start: Callable[..., Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checkpoints, "FETCHED_S", 0.0)
    client = start(every=1)
    model_id = client.begin()
    unfetched = client.loss(model_id, 1)
    for number in range(2, 20, 2):
        client.result(client.step(model_id, number))
        client.result(client.loss(model_id, number + 1))
    client.close()
    assert requests_of(model_id, tmp_path) == [17, 18, 19]
    assert results_of(model_id, tmp_path) == [1, 17, 18, 19]
    second = start(every=1)
    second.session = client.session
    assert isinstance(second.result(unfetched), bytes)


def test_a_session_that_has_ended_leaves_nothing(start: Callable[..., Client], tmp_path: Path):
    client = start()
    client.begin()
    client.get(f"sessions/{client.session}/finish", {})
    client.close()
    start().close()
    assert [path.name for path in (tmp_path / "saved" / "recovery").iterdir()] == ["lock"]


def test_a_client_that_was_silent_for_an_hour_does_not_come_back(start: Callable[..., Client], tmp_path: Path):
    client = start()
    model_id = client.begin()
    client.close()
    (file,) = tmp_path.glob("saved/recovery/*/session.json")
    before = time.time() - sessions.GIVEN_UP_S - 1
    os.utime(file, (before, before))
    second = start()
    assert not file.parent.exists()
    assert second.error("get_info", {"model_id": model_id})[0] == 404


def test_a_place_is_kept_for_a_client_that_comes_back_and_for_no_other(start: Callable[..., Client], tmp_path: Path):
    client = start()
    model_id = client.begin()
    client.loss(model_id, 1)
    client.result(client.step(model_id, 2))
    client.close()
    second = start()
    other = second.get("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "x"})["session_id"]
    second.session = other
    waiting = second.create()
    assert second.get("get_info", {"model_id": model_id})["lora_rank"] == 4
    second.loss(model_id, 3)
    assert second.result(second.step(model_id, 4))["metrics"]["grad_norm"] > 0
    second.get(f"sessions/{client.session}/finish", {})
    assert second.result(waiting)["model_id"] == f"{other}:train:0"


def test_a_client_that_went_long_ago_keeps_nobody_waiting_and_may_still_come_back(
    start: Callable[..., Client], tmp_path: Path
):
    client = start()
    model_id = client.begin()
    client.close()
    (file,) = tmp_path.glob("saved/recovery/*/session.json")
    before = time.time() - sessions.SILENT_S - 1
    os.utime(file, (before, before))
    second = start()
    other = second.begin()
    assert other != model_id
    first = second.loss(model_id, 1)
    second.get(f"sessions/{second.session}/finish", {})
    assert isinstance(second.result(first), bytes)


def test_other_weights_or_settings_are_refused(start: Callable[..., Client]):
    client = start()
    model_id = client.begin()
    client.loss(model_id, 1)
    client.result(client.step(model_id, 2))
    client.close()
    second = start(dtype="bfloat16")
    problem = second.result(second.loss(model_id, 3))["error"]
    assert f"{model_id} was begun with other weights or settings than this server has now" in problem
    second.close()
    third = start()
    third.loss(model_id, 4)
    problem = third.result(third.step(model_id, 5))["error"]
    assert "no weight is changed" in problem and "other weights" in problem


def test_a_state_that_was_loaded_and_replaced_since_is_not_read_again(start: Callable[..., Client]):
    client = start()
    model_id = client.begin()
    path = f"tinker://{model_id}/weights/a"

    def save(number: int) -> None:
        body = {"model_id": model_id, "seq_id": number, "path": "a", "overwrite": True}
        assert client.result(client.get("save_weights", body))["path"] == path

    train(client, model_id, 1)
    save(3)
    train(client, model_id, 4)
    load = {"model_id": model_id, "seq_id": 6, "path": path, "optimizer": True}
    assert client.result(client.get("load_weights", load))["path"] == path
    train(client, model_id, 7)
    save(9)
    expected = client.result(client.loss(model_id, 10))
    client.close()
    second = start()
    assert second.result(second.loss(model_id, 11)) == expected


def train(client: Client, model_id: str, number: int) -> None:
    """An update by two requests."""
    client.loss(model_id, number)
    assert client.result(client.step(model_id, number + 1))["metrics"]["grad_norm"] > 0


def test_what_was_given_up_is_not_carried_out_by_the_next_server(
    start: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
):
    client = start()
    model_id = client.begin()
    train(client, model_id, 1)
    client.result(client.loss(model_id, 3))
    with monkeypatch.context() as patch:
        patch.setattr(work, "GAP_S", -1.0)
        waiting = client.step(model_id, 5)
        assert f"request 4 of {model_id} did not come" in client.result(waiting)["error"]
    train(client, model_id, 6)
    expected = client.result(client.loss(model_id, 8))
    client.close()
    second = start()
    assert second.result(waiting) == client_error(f"request 4 of {model_id} did not come within -1 s")
    assert second.result(second.loss(model_id, 9)) == expected
    assert "comes too late" in second.result(second.loss(model_id, 4))["error"]


def client_error(problem: str) -> dict[str, str]:
    return {"error": problem, "category": "user"}


def test_two_servers_do_not_share_a_folder(start: Callable[..., Client], tmp_path: Path):
    start()
    with pytest.raises(SettingError, match=f"--dir={tmp_path}/saved: another server uses this folder"):
        start()


def test_a_request_that_cannot_be_kept_is_taken_when_it_comes_again(
    start: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
):
    client = start()
    model_id = client.begin()
    with monkeypatch.context() as patch:
        patch.setattr(kept, "write_durably", full_disk)
        status, message = client.error("forward_backward", loss_body(model_id, 1), kind="application/x-protobuf")
        assert status == 503 and "the request cannot be kept: No space left on device" in message
    assert isinstance(client.result(client.loss(model_id, 1)), bytes)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_samples_of_a_known_client_that_are_lost_are_to_be_asked_for_again(start: Callable[..., Client]):
    client = start()
    model_id = client.begin()
    sampler = client.sampler(model_id, 1, 0)
    first = client.get("asample", sample_body(sampler))
    expected = client.result(first)
    client.close()
    second = start()
    assert second.error("retrieve_future", {"request_id": first["request_id"]})[0] == 410
    assert second.error("retrieve_future", {"request_id": "x:sample:0:0"})[0] == 404
    assert second.error("retrieve_future", {"request_id": f"{model_id}:77"})[0] == 404
    assert second.result(second.get("asample", sample_body(sampler, 1))) == expected


def test_samplers_of_saved_weights_and_of_the_initial_ones_stay(start: Callable[..., Client]):
    client = start()
    model_id = client.begin()
    client.loss(model_id, 1)
    client.step(model_id, 2)
    save = {"model_id": model_id, "seq_id": 3, "path": "b"}
    path = client.result(client.get("save_weights_for_sampler", save))["path"]
    base = {"session_id": client.session, "base_model": "tiny"}
    names = [
        client.get("create_sampling_session", {**base, "sampling_session_seq_id": number, **more})[
            "sampling_session_id"
        ]
        for number, more in enumerate(({}, {"model_path": path}))
    ]
    expected = [client.result(client.get("asample", sample_body(name))) for name in names]
    assert expected[0] != expected[1]
    client.close()
    second = start()
    assert [second.result(second.get("asample", sample_body(name, 1))) for name in names] == expected
    assert second.get(f"samplers/{names[1]}")["model_path"] == path


def _is_there(point: str, number: int, hit: Hit) -> bool:
    """Whether a server is at a point, with this request or a later one."""
    found = hit.facts.get("number", hit.facts.get("step"))
    return hit.point == point and isinstance(found, int) and found >= number
