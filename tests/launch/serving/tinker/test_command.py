"""`headrace tinker`: it answers from its start to SIGTERM, and mistakes end it with one line."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from support.closing import at_end
from support.policies import tiny_policy

from headrace.comm.process_tree import children_of
from headrace.launch.command import main
from headrace.rollout.serving.server import listen

PATIENCE_S = 240.0
KEY = "tml-a-key-of-the-tests"


def test_it_answers_until_sigterm_though_its_process_is_killed(tmp_path: Path):
    words = ["tinker", str(tiny_policy(tmp_path)), "--port=0", "--name=mine", f"--dir={tmp_path / 'saved'}"]
    environment = {**os.environ, "HEADRACE_API_KEY": KEY}
    command = [sys.executable, "-u", "-m", "headrace", *words, "generator.max_running=4"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    at_end(lambda: process.kill() if process.poll() is None else None)
    assert process.stdout is not None
    lines: list[str] = []
    while not (found := re.match(r"TINKER_BASE_URL=(http://127\.0\.0\.1:\d+)  ", lines[-1] if lines else "")):
        lines.append(process.stdout.readline())
        assert lines[-1], "it ended"
    assert any("base_model 'mine': " in line for line in lines)
    request = urllib.request.Request(f"{found[1]}/api/v1/get_server_capabilities", headers={"X-API-Key": KEY})
    for is_killed in (True, False):
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            (model,) = json.load(answer)["supported_models"]
        assert (model["model_name"], model["max_context_length"]) == ("mine", 256)
        (child,) = children_of(process.pid)
        if is_killed:
            os.kill(child, signal.SIGKILL)  # a request that comes now waits for the next one
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no/such/model/here"], "model.path: no/such/model/here does not exist"),
        (["MODEL", "optimizer.lr=1"], "optimizer.lr has no effect on a server"),
        (["MODEL", "--host=0.0.0.0"], "an API key is needed"),
        (["MODEL", "--models=0"], "--models must be at least 1"),
        (["MODEL", "--api-key=long-enough-key"], "--api-key: a key of the Tinker SDK begins with tml-"),
        (["MODEL", "--dir=FILE"], "--dir="),
        (["MODEL", "--ful"], "unknown option --ful, the nearest is --full"),
        (["MODEL", "--port=TAKEN"], "in use; --port=0 takes a free port"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        model = str(tiny_policy(tmp_path))
        capsys.readouterr()  # transformers' bar
        (tmp_path / "file").write_text("")
        given = {"MODEL": model, "TAKEN": port, "FILE": str(tmp_path / "file")}
        for name, value in given.items():
            words = [word.replace(name, value) for word in words]
        folder = [] if any(word.startswith("--dir") for word in words) else [f"--dir={tmp_path / 'saved'}"]
        assert main(["tinker", *words, *folder]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_without_the_extra_the_message_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "headrace.launch.config.checks.serving.find_spec", lambda name: None if name == "uvicorn" else object()
    )
    assert main(["tinker", str(tmp_path)]) == 2
    assert "headrace tinker needs uvicorn: pip install 'headrace[serve]'" in capsys.readouterr().err
