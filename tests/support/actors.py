"""Actors without a fleet, alone or as two FSDP ranks, and random batches for them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from support import forks
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from headrace.comm.messages import GroupId, TrainBatch
from headrace.comm.messages.queue import GroupRef
from headrace.comm.recipe import Recipe, TrainerSettings
from headrace.launch.config.load import read_recipe
from headrace.relay.queue.batch import Batch
from headrace.relay.queue.micro_batches import rounds
from headrace.trainer.actor_group import ActorGroup
from headrace.trainer.learners.builtin import Actor
from headrace.trainer.step_metrics import StepMetrics

DEADLINE_S = 120.0
TESTS = Path(__file__).resolve().parents[1]
ALONE = ActorGroup(rank=0, size=1, device=torch.device("cpu"), deadline_s=10)


def recipe_of(policy: Path, **settings: object) -> Recipe:
    words = {"model.path": policy, "optimizer.lr": 1e-3} | {k.replace("__", "."): v for k, v in settings.items()}
    return read_recipe(None, [f"{key}={value}" for key, value in words.items()])


def actor_of(recipe: Recipe, group: ActorGroup = ALONE) -> Actor:
    torch.manual_seed(0)
    return Actor(recipe, group)


def batch_of(step: int, first: int = 0, num_groups: int = 1, total: int = 1, group: ActorGroup = ALONE) -> Batch:
    """This rank's share of random groups of three trajectories, of 5 to 16 tokens each, by the version in training."""
    groups = [group_of(step, first + number) for number in range(num_groups)]
    taken = TrainBatch(step=step, first=first, total=total, groups=groups, metrics={})
    planned = rounds(taken.rows(), group.size, max_tokens=24)
    rows = {ref.key: row_of(ref.row.prompt, ref.row.sample, ref.num_tokens - 4) for ref in taken.rows()}
    return Batch(taken, [parts[group.rank] for parts in planned], rows)


def group_of(step: int, number: int) -> GroupRef:
    prompt = 100 * step + number
    rng = np.random.default_rng(prompt)
    lengths, rewards = rng.integers(5, 17, 3).tolist(), rng.normal(size=3).tolist()
    return GroupRef(GroupId(0, prompt), [0, 1, 2], [1] * 3, [["relay-0#1"]] * 3, [step] * 3, lengths, rewards)


def row_of(prompt: int, sample: int, length: int) -> dict[str, np.ndarray]:
    """A row with a prompt of four tokens."""
    rng = np.random.default_rng([prompt, sample])
    return {
        "prompt_ids": rng.integers(4, 99, 4).astype(np.int32),
        "response_ids": rng.integers(4, 99, length).astype(np.int32),
        "rollout_logprobs": rng.normal(-5, 0.5, length).astype(np.float32),
        "loss_mask": np.ones(length, dtype=np.uint8),
        "truncated": np.array([sample == 2], dtype=np.uint8),
    }


def with_equal_rewards(batch: Batch, num_forward: int) -> Batch:
    """The batch with one reward for all rows, and so many micro-batches without a backward pass."""
    groups = [msgspec.structs.replace(group, rewards=[0.5] * 3) for group in batch.row_batch.groups]
    return replace(batch, row_batch=msgspec.structs.replace(batch.row_batch, groups=groups), num_forward=num_forward)


def explode(batch: Batch) -> Batch:
    """The batch with advantages whose gradient is beyond float32."""
    for columns in batch.columns.values():
        columns["advantages"] = np.full(len(columns["response_ids"]), 3e38, np.float32)
    return batch


def train(actor: Actor, batches: list[Batch]) -> dict[str, Any]:
    """One step with these batches; its metrics."""
    stats, version = StepMetrics(), actor.version
    for batch in batches:
        actor.accumulate(batch, stats)
    return {**actor.step(stats), **stats.metrics(version)}


def on_two_ranks(folder: Path, script: str, *args: object) -> None:
    """Run a script in two processes. It finds its rank of one `group`, and `args` as strings."""
    on_ranks(folder, 2, 2, script, *args)


def on_ranks(folder: Path, size: int, shard_ranks: int, script: str, *args: object) -> None:
    """Run a script in so many processes, of which `shard_ranks` share the weights. It finds its rank of one `group`, and `args` as strings."""
    words = [TESTS, folder / "ranks", size, shard_ranks]
    ranks = [forks.start(RANK + script + END, [*words, rank, *args]) for rank in range(size)]
    for rank in ranks:
        rank.join(DEADLINE_S)
    assert [rank.exitcode for rank in ranks] == [0] * size


RANK = """
import sys
sys.path.insert(0, sys.argv[1])
from support.actors import *
group, args = rank_of(sys.argv[2], *map(int, sys.argv[3:6])), sys.argv[6:]
"""

END = """
from headrace.launch.processes.role_process import end_process
group.close()
end_process(0)
"""


def rank_of(store: str, size: int, shard_ranks: int, rank: int) -> ActorGroup:
    """One of the ranks, which meet through a file."""
    torch.set_num_threads(1)
    group = ActorGroup(rank, size, torch.device("cpu"), DEADLINE_S, TrainerSettings(shard_ranks=shard_ranks))
    group.connect(FileStore(store, size))
    return group
