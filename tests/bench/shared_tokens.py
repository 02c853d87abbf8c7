"""A step of the trainer with shared tokens computed once, over the same step of rows alone.

    python -m bench.shared_tokens POLICY PROMPT RESPONSE DTYPE      (a process: a step for each line on stdin)

SmolLM2-135M or `--policy`, random tokens, groups of eight responses of one length, as many groups as fill a micro-batch with shared
tokens: with fewer the update and the casts of the weights, which both ways have, would be most of it. On one thread; a step of either
way takes turns with one of the other; medians of CPU time count, from the rows to the gradient and its update, and the largest memory
above that before the steps. The ratio to aim at is that of the tokens. With a PROMPT of 0 each row has one token of its own as prompt,
and nothing is shared.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import torch

from headrace.comm.messages import GroupId, TrainBatch
from headrace.comm.messages.queue import GroupRef
from headrace.comm.recipe import BatchSettings, ModelSettings, OptimizerSettings, Recipe
from headrace.launch.recipes.smollm2 import folder
from headrace.relay.queue.batch import Batch
from headrace.relay.queue.micro_batches import tree_rounds
from headrace.trainer.actor_group import ActorGroup
from headrace.trainer.learners.actor import Actor
from headrace.trainer.step_metrics import StepMetrics

from .harness import BenchProcess, Measurement, Options, command
from .trl_peer import resident_bytes

NUM_SAMPLES = 8
_MICRO_TOKENS = 2048
_ROUNDS = 3
_PATIENCE_S = 1800.0


def measure(name: str, options: Options) -> list[Measurement]:
    """shared-PROMPT-RESPONSE-TYPE: seconds of a step over those of rows alone, beside the ratio of tokens, and the peak memory."""
    _, prompt, response, dtype = name.split("-")
    policy = options.policy or str(folder())
    with BenchProcess(command("shared_tokens", policy, prompt, response, dtype)) as process:
        process.line("ready", _PATIENCE_S)
        turns: list[list[tuple[float, float, float]]] = []
        for _ in range(_ROUNDS + 1):
            turns.append([msgspec.json.decode(_step(process), type=tuple[float, float, float]) for _ in range(2)])
    tree, alone = zip(*turns[1:], strict=True)
    seconds, memory = ([median(step[index] for step in way) for way in (tree, alone)] for index in range(2))
    tokens = tree[0][2]
    return [
        Measurement(name, f"rows alone, tokens {tokens:.3f}", seconds[0], "s", seconds[1] / seconds[0]),
        Measurement(f"{name}-memory", "rows alone", memory[0] / 1e6, "MB", memory[1] / memory[0]),
    ]


def _step(process: BenchProcess) -> str:
    assert process.process.stdin is not None
    process.process.stdin.write(b"\n")
    return process.line("[", _PATIENCE_S)


def batch_of(prompt: int, response: int, longest_in_tree: int, micro_tokens: int = _MICRO_TOKENS) -> Batch:
    """Groups as the experience queue gives them, which fill a micro-batch with their tokens that are computed."""
    rng = np.random.default_rng(0)
    is_shared = prompt > 0
    prompt = max(prompt, 1)
    alone = NUM_SAMPLES * (prompt + response)
    repeated = (NUM_SAMPLES - 1) * prompt if is_shared else 0
    num_groups = max(1, micro_tokens // (alone - repeated + repeated // 8))  # the rule of `tree_rounds`
    groups: list[GroupRef] = []
    columns: dict[str, dict[str, np.ndarray]] = {}
    same = [prompt + response] * NUM_SAMPLES
    for index in range(num_groups):
        each = list(range(NUM_SAMPLES))
        units = [["relay-0#1"]] * NUM_SAMPLES
        rewards = rng.random(NUM_SAMPLES).tolist()
        groups.append(
            GroupRef(GroupId(0, index), each, [1] * NUM_SAMPLES, units, [0] * NUM_SAMPLES, same, rewards, prompt)
        )
        shared = rng.integers(10, 4000, prompt).astype(np.int32)
        for row in groups[-1].rows():
            columns[row.key] = {
                "prompt_ids": shared if is_shared else rng.integers(10, 4000, prompt).astype(np.int32),
                "response_ids": rng.integers(10, 4000, response).astype(np.int32),
                "rollout_logprobs": np.full(response, -8, np.float32),
                "loss_mask": np.ones(response, np.uint8),
                "truncated": np.zeros(1, np.uint8),
            }
    taken = TrainBatch(step=0, first=0, total=num_groups, groups=groups, metrics={})
    planned = tree_rounds(taken.rows(), 1, micro_tokens, longest_in_tree)
    return Batch(taken, [parts[0] for parts in planned], columns, has_trees=longest_in_tree > 0)


def _serve(policy: str, prompt: int, response: int, dtype: str) -> None:
    """CPU seconds and memory of a step, and its ratio of tokens: with shared tokens once, then of rows alone, and so on."""
    probe = batch_of(prompt, response, 0)
    recipe = Recipe(
        model=ModelSettings(path=policy, dtype="bfloat16" if dtype == "bf16" else "float32"),
        batch=BatchSettings(prompts_per_step=len(probe.row_batch.groups), samples_per_prompt=NUM_SAMPLES),
        optimizer=OptimizerSettings(lr=1e-7, micro_tokens=_MICRO_TOKENS),
    )
    actor = Actor(recipe, ActorGroup(rank=0, size=1, device=torch.device("cpu"), deadline_s=60.0))
    batches = [batch_of(prompt, response, longest) for longest in (actor.longest_in_tree, 0)]
    before = resident_bytes("VmRSS")
    print("ready", flush=True)
    for number, _ in enumerate(sys.stdin):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
        started, stats = time.process_time(), StepMetrics()
        actor.accumulate(batches[number % 2], stats)
        actor.step(stats)
        seconds = time.process_time() - started
        print(json.dumps([seconds, resident_bytes("VmHWM") - before, stats.metrics(0)["actor/tree_ratio"]]), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
