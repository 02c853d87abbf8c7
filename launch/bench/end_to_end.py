"""A whole run and one of TRL's GRPOTrainer with transformers' generation, on two cores each, one after the other.

Same policy, prompts, reward, samples per step and steps, in fp32. Ours has one trainer and one rollout of one thread each, and
default settings; the peer has two threads. Time counts from the start of training to the end of the last step.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ..processes.child import print_message
from .harness import BenchProcess, Measurement, Options, peer_environment
from .policies import policy_folder

_STEPS, _PROMPTS, _SAMPLES, _NEW_TOKENS = 24, 8, 8, 256
_CORES = 2
_PEER_DEADLINE_S = 1200.0
_PEER = Path(__file__).with_name("trl_peer.py")
_REWARD = '''
def reward(completions, **_):
    """Occurrences of the word `the`, at most 6."""
    return [float(min(6, text.count(" the "))) for text in completions]
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
        "run.dir": folder / "run", "run.steps": _STEPS, "model.path": folder / "policy",
        "data.path": folder / "prompts.jsonl", "reward.path": f"{folder / 'reward.py'}:reward",
        "batch.prompts_per_step": _PROMPTS, "batch.samples_per_prompt": _SAMPLES,
        "sampling.max_new_tokens": _NEW_TOKENS, "optimizer.lr": 1e-4, "generator.max_running": _PROMPTS * _SAMPLES,
    }  # fmt: skip
    (folder / "recipe.yaml").write_text("{}")
    words = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "headrace.launch.run", str(folder / "recipe.yaml"), *words]
    subprocess.run(command, check=True, stdout=sys.stderr)
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return sum(step["response_length/mean"] for step in steps) * _PROMPTS * _SAMPLES / steps[-1]["time_s"]


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
