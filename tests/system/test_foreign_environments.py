"""Whole runs that train with environments and tools of other projects' servers."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from support.foreign_servers import PRODUCTS, TASKSET, TOOLS, serving
from support.job import Job

from headrace.launch.recipes import calculator
from headrace.launch.recipes.tiny_policy import build_policy

pytestmark = pytest.mark.extra
STEPS = 24
TOKEN = "sesame-of-the-server"
RECIPE = {
    "run.steps": STEPS,
    "roles.rollout": 1,
    "environment.max_turns": 3,
    "batch.prompts_per_step": 16,
    "batch.samples_per_prompt": 8,
    "sampling.max_new_tokens": 56,
    "generator.max_running": 64,
    "generator.kv_gb": 0.02,
    "optimizer.lr": 1e-3,
    "optimizer.warmup_steps": 2,
}


def openenv_example(random: Random) -> tuple[str, ...]:
    """A turn that asks the server for the product, its answer and a copy; mostly a guess instead."""
    product = f"{random.randint(10, 99)}*{random.randint(10, 99)}"
    result = calculator.calc(product)
    prompt = f"=\n{product}\n"
    if random.random() < calculator.CALLS:
        return prompt, product, f"\n{result}\n", result
    return prompt, str(random.randint(100, 9999))


def calculator_example(random: Random) -> tuple[str, ...]:
    prompt = calculator.draw_prompt(random)
    return prompt, *calculator.demonstrate(prompt, random)


def check_learned(job: Job, steps: int = STEPS) -> None:
    """The reward has risen, each turn is accounted for, and inserted tokens were not trained."""
    summary = json.loads((job.dir / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["accounting"]["holds"] and summary["tokens"]["holds"]
    lines = [json.loads(line) for line in (job.dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    assert len(rewards) == steps
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.15, rewards
    assert max(line.get("turns/mean", 0) for line in lines) > 1.3, "the policy talks to the server"


def test_the_tokens_of_servers_are_in_no_file_and_no_line_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("openenv")
    build_policy(tmp_path / "policy", "0123456789*=\n", openenv_example, seed=0, num_steps=1)
    data = tmp_path / "tasks.jsonl"
    data.write_text("".join(json.dumps({"prompt": "=", "seed": i}) + "\n" for i in range(64)))
    monkeypatch.setenv("SERVER_TOKEN", TOKEN)
    with serving(tmp_path, PRODUCTS, "256") as server:
        monkeypatch.delenv("SERVER_TOKEN")
        monkeypatch.setenv("ENV_KEY", TOKEN)
        job = Job(tmp_path, **RECIPE | {"run.steps": 2, "run.save_rows": "all"})
        job.settings |= {"model.path": tmp_path / "policy", "data.path": data, "reward.path": ""}
        job.start(**{"environment.path": f"openenv:{server.url}#key=ENV_KEY"})
        code, output = job.end()
    assert code == 0 and TOKEN not in output, output
    files = [path for path in job.dir.rglob("*") if path.is_file()]
    assert "key=ENV_KEY" in (job.dir / "config.yaml").read_text() and len(files) > 10
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_a_policy_learns_in_the_sessions_of_an_openenv_server(tmp_path: Path):
    pytest.importorskip("openenv")
    build_policy(tmp_path / "policy", "0123456789*=\n", openenv_example, seed=0, num_steps=300)
    data = tmp_path / "tasks.jsonl"
    data.write_text("".join(json.dumps({"prompt": "=", "seed": i}) + "\n" for i in range(512)))
    with serving(tmp_path, PRODUCTS, "256") as server:
        job = Job(tmp_path, **RECIPE)
        job.settings |= {"model.path": tmp_path / "policy", "data.path": data, "reward.path": ""}
        job.start(**{"environment.path": f"openenv:{server.url}"})
        code, output = job.end()
    assert code == 0, output
    check_learned(job)


def test_a_policy_learns_to_call_the_tools_of_an_mcp_server(tmp_path: Path):
    pytest.importorskip("mcp")
    (tmp_path / "tools.py").write_text(TOOLS)
    entry = f"mcp:{shlex.join([sys.executable, str(tmp_path / 'tools.py')])}"
    build_policy(tmp_path / "policy", calculator.CHARACTERS, calculator_example, seed=0, num_steps=300)
    calculator.write_data(tmp_path / "products.jsonl", 512, 0)
    job = Job(tmp_path, **RECIPE)
    job.settings |= {"model.path": tmp_path / "policy", "data.path": tmp_path / "products.jsonl"}
    job.start(**{"environment.tools": json.dumps([entry]), "reward.path": f"{calculator.__file__}:reward"})
    code, output = job.end()
    assert code == 0, output
    check_learned(job)


TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"


def test_a_policy_learns_the_tasks_of_a_verifiers_taskset(tmp_path: Path):
    pytest.importorskip("verifiers")
    (tmp_path / "product_tasks.py").write_text(TASKSET)
    build_policy(tmp_path / "policy", "0123456789*=\n", openenv_example, seed=0, num_steps=300)
    words = [sys.executable, "-m", "headrace.launch.agents.command", "verifiers:product-tasks"]
    path = f"{tmp_path}:{os.environ['PYTHONPATH']}"
    given = {"env": os.environ | {"PYTHONPATH": path}, "text": True, "stdout": subprocess.PIPE, "timeout": 400}
    rows = subprocess.run([*words, "--rows", "agent.runtime.type=subprocess"], check=True, **given).stdout
    (tmp_path / "tasks.jsonl").write_text(rows)
    job = Job(tmp_path, **RECIPE)
    job.settings |= {"model.path": tmp_path / "policy", "data.path": tmp_path / "tasks.jsonl", "reward.path": ""}
    few = 10
    job.settings |= {"run.steps": few, "batch.prompts_per_step": 8, "batch.samples_per_prompt": 6}
    job.start(**{"environment.path": "serve", "rollout.serve": 0, "data.chat_template": TEMPLATE})
    job.until((job.dir / "serve.json").exists)
    agent = subprocess.run([*words, str(job.dir), "agent.runtime.type=subprocess"], check=False, **given)
    code, output = job.end()
    assert code == 0, output
    assert agent.returncode == 0 and ", 0 have failed" in agent.stdout.splitlines()[-1], agent.stdout
    check_learned(job, few)
