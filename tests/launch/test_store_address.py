"""How a rank finds the run's store, and how its wait ends."""

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.comm.environment import ADDRESS_FILE, STORE
from headrace.comm.errors import StoreGone
from headrace.launch import run
from headrace.launch.processes import store_address
from headrace.launch.processes.store_address import find_store, has_store_ended, start_id

PATIENCE_S = 60.0
WAITING = """
import signal, sys
from pathlib import Path
from headrace.launch import run
from headrace.launch.processes import store_address
from headrace.launch.processes.signals import block_signals
block_signals()
store_address.INTERRUPTED_S = 0.2
print("waits", flush=True)
try:
    print(store_address.find_store(Path(sys.argv[1])))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.fixture(autouse=True)
def first_host(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(STORE, raising=False)
    monkeypatch.setenv("GROUP_RANK", "0")


def test_only_the_address_of_this_start_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_address, "FIND_S", 0.1)
    (tmp_path / ADDRESS_FILE).write_text("127.0.0.1:1\nof an earlier start\n")
    with pytest.raises(StoreGone, match="has not given the address"):
        find_store(tmp_path)
    (tmp_path / ADDRESS_FILE).write_text(f"127.0.0.1:2\n{start_id()}\n")
    assert find_store(tmp_path) == "127.0.0.1:2"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # torchrun has started its ranks again
    with pytest.raises(StoreGone):
        find_store(tmp_path)


@pytest.mark.parametrize("group_rank", ["0", "1"])
def test_a_signal_ends_the_wait_for_a_store_that_never_comes(tmp_path: Path, group_rank: str):
    """The signal is blocked: the supervisor takes it, once it has the address."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1]), "GROUP_RANK": group_rank}
        waiting = subprocess.Popen(
            [sys.executable, "-c", WAITING, str(tmp_path)],
            env={**os.environ, **place, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert waiting.stdout and waiting.stdout.readline() == "waits\n"
        waiting.send_signal(signal.SIGTERM)
        assert waiting.communicate(timeout=PATIENCE_S)[0] == "interrupted\n"


@pytest.mark.parametrize(
    ("end", "code", "printed"),
    [(StoreGone("no store answers"), 1, "headrace: error: no store answers\n"), (KeyboardInterrupt(), 0, "")],
)
def test_a_rank_without_a_store_ends_with_one_line_on_each_host(monkeypatch, capsys, end, code: int, printed: str):
    def run_rank(*_: object, **__: object) -> int:
        raise end

    monkeypatch.setattr("headrace.launch.start.run_rank", run_rank)
    monkeypatch.setattr("headrace.launch.processes.signals.block_signals", lambda: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for local_rank, expected in (("0", printed), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert run.main(["recipe.yaml"]) == code
        assert capsys.readouterr().err == expected


def test_a_store_that_takes_connections_and_ends_them_has_ended_and_one_that_is_silent_has_not(monkeypatch):
    monkeypatch.setattr("headrace.launch.processes.store_address.STORE_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert not has_store_ended(address)
        listener.accept()[0].close()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(has_store_ended, address)
            listener.accept()[0].close()
            assert asked.result(PATIENCE_S)
    assert has_store_ended(address)
