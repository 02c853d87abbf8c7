"""A server that is killed, and started again on its folder and port, goes on: scripts notice nothing, and get the same numbers bit by bit."""

import os
import random
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bench.faults.failpoints import Hit, held_at
from support.policies import tiny_policy
from support.tinker_client import PATIENCE_S
from support.tinker_script import KilledServer, PatientClient, script

from headrace.comm.trace import FAILPOINTS


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


@pytest.mark.parametrize("seed", range(3))
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
    for number in (3, 9, 17):
        is_wanted = partial(_is_there, point, number)
        with held_at(address, is_wanted, PATIENCE_S) as hit:
            assert hit is not None
            os.kill(hit.pid, signal.SIGKILL)
        server.restart()
    assert running.result() == whole


def _is_there(point: str, number: int, hit: Hit) -> bool:
    """Whether a server is at a point, with this request or a later one."""
    found = hit.facts.get("number", hit.facts.get("step"))
    return hit.point == point and isinstance(found, int) and found >= number
