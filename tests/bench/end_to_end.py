"""Whole runs: beside one of TRL's GRPOTrainer, and with environments that take their time.

TRL's generates by transformers, on two cores each, one after the other. Same policy, prompts, reward, samples per step and steps, in fp32. Ours has one trainer and one rollout of one thread each, and
default settings; the peer has two threads. Time counts from the start of training to the end of the last step.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from headrace.launch.processes.child import print_message
from headrace.launch.recipes.tiny_policy import character_tokenizer
from headrace.launch.report.timeline import Timeline

from .harness import BenchProcess, Measurement, Options, peer_environment
from .policies import build, policy_folder

_STEPS, _PROMPTS, _SAMPLES, _NEW_TOKENS = 24, 8, 8, 256
_CORES = 2
_PEER_DEADLINE_S = 1200.0
_PEER = Path(__file__).with_name("trl_peer.py")
_REWARD = '''
def reward(completions, **_):
    """Occurrences of the word `the`, at most 6."""
    return [float(min(6, text.count(" the "))) for text in completions]
'''
_ENVIRONMENTS, _TURNS, _LATENCY_S = 256, 4, 1.0
_TURN_STEPS, _LEAST_BUSY = 5, 0.8
_ROOMS = '''
import asyncio

import torch
from headrace.relay.queue.stream import RunStopped
from headrace.trainer.service import TrainerService
from transformers import AutoModelForCausalLM


class Quick:
    """Answers every turn at once."""

    latency_s = 0.0

    async def step(self, completion):
        await asyncio.sleep(self.latency_s)
        return " and then ", float(len(completion)), False

    async def reset(self, **row):
        pass


class Slow(Quick):
    """Answers every turn later, as a tool of another host does."""

    latency_s = %s


def trainer(fleet, recipe):
    """Reads the rows of each step and publishes the same weights again: the rollout has as much work as it can do."""
    weights = dict(AutoModelForCausalLM.from_pretrained(recipe.model.path, dtype=torch.float32).named_parameters())
    service = TrainerService(fleet, recipe).start(weights)
    try:
        while service.version < recipe.run.steps:
            for _ in service.experience():
                pass
            service.publish(weights)
    except RunStopped:
        pass
    service.close()
'''
_OPENINGS = (
    "Once upon a time",
    "One day, a",
    "There was a",
    "The little",
    "A big",
    "In a small",
    "It was a",
    "The sun was",
)
_ENDS = ("", " dog", " cat", " happy", " boy", " little", " girl", " red")


def beside_trl(name: str, options: Options) -> list[Measurement]:
    """Response tokens per second of the run, and the ratio to TRL's."""
    if options.trl_python is None:
        print_message(f"{name} is left out: name an interpreter with TRL by --trl-python")
        return []
    with tempfile.TemporaryDirectory(prefix="headrace-bench") as made:
        folder = Path(made)
        policy_folder(folder, options.policy)
        prompts = [opening + end for end in _ENDS for opening in _OPENINGS]
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        (folder / "reward.py").write_text(_REWARD)
        with _on_cores(_CORES):
            ours, theirs = _ours(folder), _theirs(folder, options.trl_python)
    return [Measurement(name, "GRPOTrainer", ours, "tokens/s", ours / theirs)]


def slow_environments(name: str, options: Options) -> list[Measurement]:
    """The share of a rollout's time in which it decodes, while 256 environments take 1 s for each answer, and its ratio to the
    share with environments that answer at once."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench") as made:
        folder = Path(made)
        build("4m", folder).rename(folder / "policy")
        character_tokenizer(" abcdefghijklmnopqrstuvwxyz").save_pretrained(folder / "policy")
        (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "{opening}"}}\n' for opening in _OPENINGS).lower())
        (folder / "rooms.py").write_text(_ROOMS % _LATENCY_S)
        quick, slow = (_busy_share(folder, kind) for kind in ("Quick", "Slow"))
    return [Measurement(name, "answers at once", slow, "busy", slow / quick, holds=slow > _LEAST_BUSY)]


def _busy_share(folder: Path, environment: str) -> float:
    """Of the one rollout of a run, between its second version and its last one. A turn has 16 tokens on average."""
    settings: dict[str, object] = {
        "run.dir": folder / environment, "run.steps": _TURN_STEPS, "model.path": folder / "policy", "model.dtype": "float32",
        "run.schedule": "partial", "data.path": folder / "prompts.jsonl", "roles.rollout": 1,
        "trainer.engine": f"{folder / 'rooms.py'}:trainer", "environment.path": f"{folder / 'rooms.py'}:{environment}",
        "environment.max_turns": _TURNS, "batch.prompts_per_step": _ENVIRONMENTS // _SAMPLES,
        "batch.samples_per_prompt": _SAMPLES, "sampling.max_new_tokens": 1024, "sampling.stop": "[z]",
        "generator.max_running": _ENVIRONMENTS,
    }  # fmt: skip
    _run(folder, settings)
    spans = Timeline.read(folder / environment).spans["rollout-0"]
    first, last = (next(span.start for span in spans if span.facts.get("version") == v) for v in (1, _TURN_STEPS - 1))
    decoding = sum(span.end - span.start for span in spans if span.state == "generate" and first <= span.start < last)
    return decoding / (last - first)


@contextmanager
def _on_cores(count: int) -> Iterator[None]:
    """Processes that start here run on this many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _ours(folder: Path) -> float:
    settings: dict[str, object] = {
        "run.dir": folder / "run", "run.steps": _STEPS, "model.path": folder / "policy", "model.dtype": "float32",
        "data.path": folder / "prompts.jsonl", "reward.path": f"{folder / 'reward.py'}:reward",
        "batch.prompts_per_step": _PROMPTS, "batch.samples_per_prompt": _SAMPLES,
        "sampling.max_new_tokens": _NEW_TOKENS, "optimizer.lr": 1e-4, "generator.max_running": _PROMPTS * _SAMPLES,
    }  # fmt: skip
    _run(folder, settings)
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return sum(step["response_length/mean"] for step in steps) * _PROMPTS * _SAMPLES / steps[-1]["time_s"]


def _run(folder: Path, settings: Mapping[str, object]) -> None:
    (folder / "recipe.yaml").write_text("{}")
    words = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "headrace.launch.run", str(folder / "recipe.yaml"), *words, "--trace"]
    subprocess.run(command, check=True, stdout=sys.stderr)


def _theirs(folder: Path, python: str) -> float:
    settings = {
        "per_device_train_batch_size": 16, "gradient_accumulation_steps": _PROMPTS * _SAMPLES // 16,
        "num_generations": _SAMPLES, "max_completion_length": _NEW_TOKENS, "learning_rate": 1e-4, "max_steps": _STEPS,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(settings))
    # transformers' continuous batching (the word `batching`) takes several times as long on a CPU.
    words = [python, str(_PEER), "run", str(folder), "plain"]
    with BenchProcess(words, peer_environment(_CORES)) as peer:
        seconds, num_tokens = msgspec.json.decode(peer.line("[", _PEER_DEADLINE_S))
    return num_tokens / seconds
