"""The agent of the page for users, as a process beside a run of the launcher; and deaths on the way."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.closing import at_end
from support.job import Job, MakeJob, assert_account_adds_up, child_of
from support.source_tree import ROOT

pytest.importorskip("uvicorn")
pytest.importorskip("openai")
AGENT = ROOT / "docs" / "use" / "calculator_agent.py"
SILENCE_S = 3
FAILURE = f"the agent said nothing for {SILENCE_S} s (environment.timeout_s)"


def served_job(job: MakeJob, folder: Path, **settings: Any) -> Job:
    run = job(
        rollout__serve=0, environment__path="serve", environment__timeout_s=SILENCE_S, reward__path="", **settings
    )
    rows = ({"prompt": f"{i}*{i}=", "answer": str(i * i)} for i in range(10, 50))
    data = folder / "squares.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.settings["data.path"] = data
    run.start()
    run.until(lambda: is_there(run))
    return run


def is_there(run: Job) -> bool:
    try:
        url = json.loads((run.dir / "serve.json").read_text())["url"]
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False


def start_agent(run: Job) -> "subprocess.Popen[bytes]":
    agent = subprocess.Popen([sys.executable, str(AGENT), str(run.dir)], stdout=subprocess.DEVNULL)

    def end() -> None:
        agent.kill()
        agent.wait(30)

    at_end(end)
    return agent


def test_the_agent_of_the_page_trains_a_run(job: MakeJob, tmp_path: Path):
    run = served_job(job, tmp_path)
    agent = start_agent(run)
    code, output = run.end()
    assert code == 0 and "first prompts handed out, to front-0" in output, output
    assert_account_adds_up(run)
    summary = run.summary()
    assert summary["steps"] == 4 and summary["tokens"]["holds"] and summary["tokens"]["trained"] > 0
    assert summary["tokens"]["served"] >= summary["tokens"]["trained"]
    assert agent.wait(60) == 0, "its threads end with the run"
    assert len(AGENT.read_text().splitlines()) <= 40


def test_agents_rollouts_and_the_front_are_killed_and_the_run_trains_on(job: MakeJob, tmp_path: Path):
    run = served_job(job, tmp_path, run__steps=100000, queue__max_lost_batches="null")
    first = start_agent(run)
    run.wait_for_step(1)
    first.kill()
    start_agent(run)
    run.until(lambda: FAILURE in run.console.read_text())
    run.wait_for_step(len(run.metrics()) + 1)
    os.kill(child_of(run, "rollout-0"), signal.SIGKILL)
    run.wait_for_step(len(run.metrics()) + 1)
    os.kill(child_of(run, "front-0"), signal.SIGKILL)
    run.until(lambda: "front was ended by SIGKILL" in run.console.read_text())
    run.until(lambda: is_there(run))
    third = start_agent(run)  # those before have lost their server
    run.wait_for_step(len(run.metrics()) + 2)
    run.signal(signal.SIGINT)
    code, output = run.end()
    assert code == 130, output
    assert_account_adds_up(run)
    assert run.summary()["tokens"]["holds"]
    assert third.wait(60) == 0
