"""A GRPO step of the trainer and of TRL's GRPOTrainer on the same rollouts.

    python -m bench.trainer FOLDER          (our process: a step for each line on stdin)

Both train the same policy in fp32 on one thread with AdamW. Eight groups of eight responses have lengths as the generator's
workloads have them, but longer: log-normal, sigma 0.9, median 90, at most 400. The two take turns; medians of CPU time count.
"""

import json
import sys
import tempfile
import time
from contextlib import ExitStack
from math import exp, log
from pathlib import Path
from random import Random
from statistics import median

import msgspec
import numpy as np
import torch
from transformers import AutoConfig

from headrace.comm.messages import GroupId, TrainBatch
from headrace.comm.messages.queue import GroupRef
from headrace.comm.recipe import BatchSettings, ModelSettings, OptimizerSettings, Recipe
from headrace.launch.processes.child import print_message
from headrace.relay.queue.batch import Batch
from headrace.relay.queue.micro_batches import tree_rounds
from headrace.trainer.actor_group import ActorGroup
from headrace.trainer.learners.actor import Actor
from headrace.trainer.step_metrics import StepMetrics

from .harness import BenchProcess, Measurement, Options, command, peer_environment
from .policies import policy_folder
from .trl_peer import resident_bytes

_NUM_GROUPS, _NUM_SAMPLES = 8, 8
_ROUNDS = 5
_PEER_BATCH = 8
"""Sequences in a batch of TRL's: of 8, 16 and 64 the fastest or equally fast, and the one with the least memory."""
_MICRO_TOKENS = 2048
"""Of a micro-batch of ours: on a CPU as fast as larger ones, with less memory."""
_PEER = Path(__file__).with_name("trl_peer.py")


def beside_trl(name: str, options: Options) -> list[Measurement]:
    """Tokens/s and peak memory of a step, and their ratios to TRL's; above 1 ours is better."""
    if options.trl_python is None:
        print_message(f"{name} is left out: name an interpreter with TRL by --trl-python")
        return []
    with tempfile.TemporaryDirectory(prefix="headrace-bench") as made, ExitStack() as stack:
        folder = Path(made)
        policy_folder(folder, options.policy)
        num_tokens = write_rollouts(folder)
        ours = stack.enter_context(BenchProcess(command("trainer", folder)))
        words = [options.trl_python, str(_PEER), "step", str(folder), str(_PEER_BATCH)]
        theirs = stack.enter_context(BenchProcess(words, peer_environment(1)))
        processes = ours, theirs
        for process in processes:
            process.line("ready")
        rounds = [[msgspec.json.decode(process.ask("[")) for process in processes] for _ in range(_ROUNDS + 1)][1:]
        for process in processes:
            process.process.kill()
    seconds = [median(each[index][0] for each in rounds) for index in range(2)]
    memory = [rounds[-1][index][1] for index in range(2)]
    return [
        Measurement("trainer-tokens", "GRPOTrainer", num_tokens / seconds[0], "1/s", seconds[1] / seconds[0]),
        Measurement("trainer-memory", "GRPOTrainer", memory[0] / 1e6, "MB", memory[1] / memory[0]),
    ]


def write_rollouts(folder: Path) -> int:
    """Write FOLDER/rollouts.json for the vocabulary of FOLDER/policy; returns the tokens of prompts and responses."""
    rng = Random(0)
    vocab: int = AutoConfig.from_pretrained(folder / "policy").vocab_size

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, vocab) for _ in range(count)]

    prompts = [tokens(rng.randint(8, 64)) for _ in range(_NUM_GROUPS)]
    lengths = [max(1, min(400, int(exp(rng.gauss(log(90), 0.9))))) for _ in range(_NUM_GROUPS * _NUM_SAMPLES)]
    responses = [tokens(length) for length in lengths]
    rewards = [rng.random() for _ in responses]
    (folder / "rollouts.json").write_text(
        json.dumps({"prompts": prompts, "completions": responses, "rewards": rewards})
    )
    return sum(lengths) + _NUM_SAMPLES * sum(map(len, prompts))


def _batch(folder: Path, max_tokens: int, longest_in_tree: int) -> Batch:
    """The rollouts as the experience queue gives them."""
    given = json.loads((folder / "rollouts.json").read_text())
    groups: list[GroupRef] = []
    columns: dict[str, dict[str, np.ndarray]] = {}
    each, same = range(_NUM_SAMPLES), [1] * _NUM_SAMPLES
    for index, prompt in enumerate(given["prompts"]):
        part = slice(index * _NUM_SAMPLES, (index + 1) * _NUM_SAMPLES)
        responses, units = given["completions"][part], [["relay-0#1"] for _ in each]
        sizes = [len(prompt) + len(response) for response in responses]
        rewards = given["rewards"][part]
        group = GroupRef(GroupId(0, index), [*each], same, units, [0 for _ in each], sizes, rewards, len(prompt))
        groups.append(group)
        for row, response in zip(group.rows(), responses, strict=True):
            columns[row.key] = {
                "prompt_ids": np.array(prompt, np.int32),
                "response_ids": np.array(response, np.int32),
                "rollout_logprobs": np.full(len(response), -log(len(response) + 1), np.float32),
                "loss_mask": np.ones(len(response), np.uint8),
                "truncated": np.zeros(1, np.uint8),
            }
    taken = TrainBatch(step=0, first=0, total=len(groups), groups=groups, metrics={})
    planned = tree_rounds(taken.rows(), 1, max_tokens, longest_in_tree)
    return Batch(taken, [parts[0] for parts in planned], columns, has_trees=longest_in_tree > 0)


def _serve(folder: Path) -> None:
    """Our process: the CPU seconds of each step, and the largest memory above that before the first one."""
    batch_settings = BatchSettings(prompts_per_step=_NUM_GROUPS, samples_per_prompt=_NUM_SAMPLES)
    recipe = Recipe(
        model=ModelSettings(path=str(folder / "policy")),
        batch=batch_settings,
        optimizer=OptimizerSettings(lr=1e-4, micro_tokens=_MICRO_TOKENS),
    )
    actor = Actor(recipe, ActorGroup(rank=0, size=1, device=torch.device("cpu"), deadline_s=60.0))
    batch = _batch(folder, _MICRO_TOKENS, actor.longest_in_tree)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    before = resident_bytes("VmRSS")
    print("ready", flush=True)
    for _ in sys.stdin:
        started, stats = time.process_time(), StepMetrics()
        actor.accumulate(batch, stats)
        actor.step(stats)
        print(json.dumps([time.process_time() - started, resident_bytes("VmHWM") - before]), flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
