"""`headrace serve`: a model answers from its start to SIGTERM, and mistakes end it with one line."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.closing import at_end
from support.policies import character_tokenizer, policy_with_template, tiny_policy
from support.served import ScriptedGenerator, serve

from headrace.launch.command import main
from headrace.rollout.serving.access import SERVE_FILE
from headrace.rollout.serving.server import listen

PATIENCE_S = 240.0


def ask(url: str, body: Any = None, key: str = "") -> Any:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.load(answer)


def test_a_checkpoint_of_a_run_answers_until_sigterm(tmp_path: Path):
    policy_with_template(tmp_path / "run" / "checkpoints" / "step_12" / "hf")
    model = str(tmp_path / "run" / "checkpoints" / "step_12" / "hf")
    words = ["serve", model, "--port=0", "--name=mine", "generator.max_running=4"]
    environment = {**os.environ, "HEADRACE_API_KEY": "a-key-of-12-characters"}
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "headrace", *words], stdout=subprocess.PIPE, text=True, env=environment
    )
    at_end(lambda: process.kill() if process.poll() is None else None)
    assert process.stdout is not None
    lines: list[str] = []
    while not (found := re.match(r"(http://127\.0\.0\.1:\d+/v1)  ", lines[-1] if lines else "")):
        lines.append(process.stdout.readline())
        assert lines[-1], "it ended"
    assert any("serving 'mine', after 12 steps" in line for line in lines)
    key = "a-key-of-12-characters"
    (card,) = ask(f"{found[1]}/models", key=key)["data"]
    assert (card["id"], card["max_model_len"], card["weight_version"]) == ("mine", 256, 12)
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    answer = ask(f"{found[1]}/chat/completions", body, key)
    assert set(answer["choices"][0]["weight_version"]) == {12}
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name one model"),
        (["no/such/model/here"], "model.path: no/such/model/here does not exist"),
        (["MODEL", "optimizer.learning_rate=1"], "optimizer.learning_rate has no effect on a server"),
        (["MODEL", "--host=0.0.0.0"], "an API key is needed"),
        (["MODEL", "--port=x"], "--port"),
        (["MODEL", "--timeout=0"], "--timeout must be above 0"),
        (["MODEL", "--api-key=short"], "--api-key: a key has at least"),
        (["MODEL", "--prot=1"], "unknown option --prot, the nearest is --port"),
        (["MODEL", "--port=TAKEN"], "in use; --port=0 takes a free port"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        model = str(tiny_policy(tmp_path))
        assert main(["serve", *(word.replace("MODEL", model).replace("TAKEN", port) for word in words)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_of_a_running_job_the_address_of_its_front_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    front = serve(ScriptedGenerator(), character_tokenizer())
    url = f"http://127.0.0.1:{front.port}"
    (tmp_path / SERVE_FILE).write_text(json.dumps({"url": url, "model": "mine"}))
    assert main(["serve", str(tmp_path)]) == 0
    assert f"the rollouts of this running job answer at {url}/v1" in capsys.readouterr().out
    front.thread.close()
    assert main(["serve", str(tmp_path)]) == 2, "that of a run that was killed"
    assert str(tmp_path) in capsys.readouterr().err


def test_without_the_extra_the_message_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "headrace.launch.config.checks.serving.find_spec", lambda name: None if name == "uvicorn" else object()
    )
    assert main(["serve", str(tiny_policy(tmp_path))]) == 2
    assert "headrace serve needs uvicorn: pip install 'headrace[serve]'" in capsys.readouterr().err
