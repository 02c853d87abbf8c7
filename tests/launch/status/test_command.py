"""`headrace status` of a run under way, of one that has ended, of one that starts, and of a folder that is none."""

import fcntl
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.terminal import Terminal

from headrace.comm.environment import ADDRESS_FILE
from headrace.comm.mailbox import StoreMailboxes
from headrace.comm.messages import MemberStatus, StatusReport, StatusRequested, WaitStatus
from headrace.comm.store.client import StoreClient
from headrace.comm.store.server import StoreServer
from headrace.launch.config import run_folder
from headrace.launch.config.run_folder import CONFIG_FILE, SUMMARY_FILE, lock_run_folder
from headrace.launch.status.command import main, status

SECRET = "a secret of the test"
PATIENCE_S = 120.0
MEMBERS = [MemberStatus("hub", "here", 1, 0, "decides"), MemberStatus("actor-0", "here", 1, 0, "waits", 12.0, 3)]
WAITS = [WaitStatus("actor-0", "rollout-1", "groups", 12.0)]
SUMMARY = {"status": "finished", "steps": 7, "reward_first": 0.1, "reward_last": 0.9, "time_s": 61.0, "exit_code": 0}


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SECRET", SECRET)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / CONFIG_FILE).write_text("{}")
    return tmp_path


@contextmanager
def hub(run_dir: Path, num_steps: int = 10) -> Iterator[StoreServer]:
    """A store, and a hub that answers each question with one step more."""
    server = StoreServer("127.0.0.1", SECRET.encode()).start()
    (run_dir / ADDRESS_FILE).write_text(f"{server.address}\nstart\n")
    client = StoreClient.connect(server.address, SECRET.encode(), PATIENCE_S)
    mailboxes = StoreMailboxes(client)
    inbox = mailboxes.open("hub")
    is_over = threading.Event()

    def answer() -> None:
        step = 0
        while not is_over.is_set():
            envelope = inbox.receive(0.05)
            if envelope is not None and isinstance(envelope.message, StatusRequested):
                step += 1
                account: dict[str, int | bool] = {"leased": 4, "holds": True}
                report = StatusReport(step, step, MEMBERS, account, num_steps=num_steps, waits=WAITS)
                inbox.send(envelope.message.reply_to, report)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        is_over.set()
        thread.join(PATIENCE_S)
        mailboxes.close()
        client.close()
        server.close()


def test_a_run_under_way_tells_its_processes_and_who_waits_for_whom(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    with hub(run_dir):
        assert status([str(run_dir)]) == 0
        first = capsys.readouterr().out
        assert main([str(run_dir), "status"]) == 0
        second = capsys.readouterr().out
    assert first.startswith("1 of 10 steps") and second.startswith("2 of 10 steps")
    assert "\nactor-0  waits 12 s  version 3\n" in first and "\x1b" not in first
    assert "\nactor-0 waits for rollout-1: groups, 12 s\n" in first and first.endswith("rows: leased 4, holds True\n")


def test_an_address_needs_no_folder(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    with hub(run_dir) as server:
        assert status([server.address]) == 0
    assert capsys.readouterr().out.startswith("1 of 10 steps")


def test_a_run_that_has_ended_says_how(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    (run_dir / SUMMARY_FILE).write_text(json.dumps(SUMMARY))
    for words in ([str(run_dir)], [str(run_dir), "--watch"]):
        assert status(words) == 0
        assert capsys.readouterr().out == (
            f"the run in {run_dir} has ended: finished after 7 steps, reward 0.100 -> 0.900, in 1 min 1 s\n"
        )
    (run_dir / SUMMARY_FILE).write_text(json.dumps({"status": "failed", "steps": 2, "error": "no reward"}))
    assert status([str(run_dir)]) == 0
    assert "failed after 2 steps: no reward\n" in capsys.readouterr().out


def test_a_run_that_starts_is_told_from_one_that_is_gone(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    with lock_run_folder(run_dir):
        assert status([str(run_dir)]) == 1
        assert "is starting: its processes are not there yet" in capsys.readouterr().err
    assert status([str(run_dir)]) == 1
    assert "has ended without a summary, or has not begun" in capsys.readouterr().err
    with hub(run_dir):
        pass  # its address stays, and nobody answers there
    assert status([str(run_dir)]) == 1
    assert "has ended without a summary, or has not begun" in capsys.readouterr().err


def test_a_folder_of_no_run_is_a_mistake(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    assert status([str(tmp_path)]) == 2
    assert f"{tmp_path} is not the folder of a run: it has no config.yaml" in capsys.readouterr().err
    monkeypatch.delenv("HEADRACE_SECRET")
    assert status([str(tmp_path / "none")]) == 2
    assert f"there is no folder {tmp_path / 'none'}; the folder of a run that starts is made" in capsys.readouterr().err
    assert status(["localhost:1234"]) == 2
    assert "is not the folder of a run; an address needs HEADRACE_SECRET too" in capsys.readouterr().err


def test_watching_draws_in_one_place_until_the_run_ends(run_dir: Path):
    command = [sys.executable, "-m", "headrace", "status", str(run_dir), "--watch"]
    with lock_run_folder(run_dir), Terminal(command, {"HEADRACE_SECRET": SECRET}) as terminal:
        terminal.until(lambda text: "the run is starting" in text, PATIENCE_S)
        with hub(run_dir):
            text = terminal.until(lambda text: "3 of 10 steps" in text, PATIENCE_S)
            assert text.count("of 10 steps") == 1 and "actor-0 waits for rollout-1: groups, 12 s" in text
            (run_dir / SUMMARY_FILE).write_text(json.dumps(SUMMARY))
        code, text = terminal.end(PATIENCE_S)
    assert code == 0 and "of 10 steps" not in text and "actor-0" not in text
    assert text.replace("\n", "").endswith("has ended: finished after 7 steps, reward 0.100 -> 0.900, in 1 min 1 s")
    assert b"\x1b[?" not in terminal.raw


def test_the_status_imports_no_large_library(run_dir: Path):
    command = [sys.executable, "-X", "importtime", "-m", "headrace", "status", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert done.returncode == 1 and "headrace" in loaded
    assert not loaded & {"torch", "transformers", "rich", "tensorboard", "datasets"}


def test_a_look_at_the_lock_does_not_refuse_a_start(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    with (run_dir / "lock").open("wb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        waits: list[float] = []

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            fcntl.flock(looking, fcntl.LOCK_UN)

        monkeypatch.setattr(run_folder.time, "sleep", sleep)
        with lock_run_folder(run_dir):
            assert len(waits) == 1
