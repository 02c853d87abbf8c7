"""A serving process is started again after a crash, not after a mistake, not without an end, and not before it has answered once."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from headrace.launch.serving import restarted
from headrace.launch.serving.restarted import serve_restarted
from headrace.rollout.serving.server import listen

CHILD = """
import os, sys, time
from pathlib import Path
from headrace.launch.serving.restarted import inherited_socket, tell_ready
log, *words = sys.argv[1:]
opened = inherited_socket()
with open(log, "a") as file:
    file.write(f"{opened.getsockname()[1]}\\n")
for word in words:
    if word == "ready":
        tell_ready()
    elif word == "wait":
        time.sleep(600)
    elif word == "crash":
        os.kill(os.getpid(), 9)
    elif word == "crash-once":
        if len(Path(log).read_text().splitlines()) == 1:
            os.kill(os.getpid(), 9)
    else:
        sys.exit(int(word))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str]]]:
    """The exit code of a child that does what the words say, and the ports of its starts."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    log = tmp_path / "log"
    child = restarted.Child
    monkeypatch.setattr(
        restarted, "Child", lambda name, line, **more: child(name, [sys.executable, str(script), *line[6:]], **more)
    )

    def serve(*words: str) -> tuple[int, list[str]]:
        with closing(listen("127.0.0.1", 0)) as opened:
            code = serve_restarted("tinker", [str(log), *words], opened)
            ports = log.read_text().splitlines()
            assert set(ports) == {str(opened.getsockname()[1])}
        return code, ports

    return serve


@pytest.mark.parametrize(
    ("words", "code", "num_starts", "told"),
    [
        (["ready", "0"], 0, 1, ""),
        (["ready", "2"], 2, 1, ""),
        (["3"], 1, 1, "tinker ended with exit code 3"),
        (["ready", "crash-once", "0"], 0, 2, "tinker was ended by SIGKILL and is started again; scripts go on"),
        (["ready", "crash"], 1, 6, "tinker was ended by SIGKILL, again and again"),
    ],
)
def test_a_child_is_started_again_if_it_has_answered_and_crashed(
    words: list[str],
    code: int,
    num_starts: int,
    told: str,
    run: Callable[..., tuple[int, list[str]]],
    capfd: pytest.CaptureFixture[str],
):
    found, ports = run(*words)
    assert (found, len(ports)) == (code, num_starts)
    error = capfd.readouterr().err
    assert told in error if told else not error


def test_a_signal_ends_the_child_and_the_parent(run: Callable[..., tuple[int, list[str]]], tmp_path: Path):
    def interrupt() -> None:
        while not (tmp_path / "log").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    assert run("ready", "wait")[0] == 0
