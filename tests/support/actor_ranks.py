"""Ranks of a trainer as processes over Gloo: each trains a policy on its share of some sequences and saves the result."""

from pathlib import Path
from typing import Any

import msgspec
import torch
from support import forks
from support.policies import random_prompts
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from headrace.comm.recipe import TrainerSettings
from headrace.relay.weights.layout import local_tensor
from headrace.trainer.actor_group import ActorGroup, gather_full
from headrace.trainer.policy.model import load_policy

RANK = """
import sys
sys.path.insert(0, sys.argv[1])
from support import actor_ranks
from headrace.launch.processes.role_process import end_process
actor_ranks.main(sys.argv[2], int(sys.argv[3]), sys.argv[4])
end_process(0)
"""
SEQUENCES = random_prompts(8, longest=60)


class Job(msgspec.Struct, frozen=True):
    """Work for the ranks: `steps` updates of the policy at `path`."""

    path: str
    size: int = 1
    steps: int = 3
    trainer: TrainerSettings = TrainerSettings()


def run_ranks(job: Job, folder: Path) -> list[dict[str, Any]]:
    """The results of all ranks."""
    folder.mkdir()
    text = msgspec.json.encode(job).decode()
    ranks = [forks.start(RANK, [Path(__file__).parents[1], folder, rank, text]) for rank in range(job.size)]
    for rank in ranks:
        rank.join(240)
    try:
        assert [rank.exitcode for rank in ranks] == [0] * job.size
    finally:
        for rank in ranks:
            rank.kill()
            rank.join(60)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(job.size)]


def kilobytes(field: str) -> int:
    """A line of this process's `/proc/self/status`, such as VmRSS."""
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(f"{field}:"))


def train(job: Job, group: ActorGroup) -> dict[str, Any]:
    """Weights, metrics of each step, and memory in KB."""
    before = kilobytes("VmRSS")
    policy = load_policy(job.path, "float32", group.device, shard=group.shard)
    loaded = kilobytes("VmHWM") - before
    if job.trainer.activation_checkpointing is True:
        policy.checkpoint_activations()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    norms = []
    for _ in range(job.steps):
        mine = SEQUENCES[group.rank :: group.size]
        tokens = torch.tensor([token for sequence in mine for token in sequence])
        bounds = torch.tensor([0, *(len(sequence) for sequence in mine)]).cumsum(0)
        is_last = torch.zeros(len(tokens), dtype=torch.bool).index_fill_(0, bounds[1:] - 1, True)
        hidden, targets = policy.forward_packed(tokens, bounds)[~is_last], tokens.roll(-1)[~is_last]
        logprobs, entropy = policy.token_logprobs(hidden, targets)
        ((logprobs.sum() + 0.1 * entropy.sum()) * group.size).backward()
        norms.append(float(gather_full(torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5))))
        optimizer.step()
        optimizer.zero_grad()
    names = group.union(["of all", *["of rank"] * group.rank])
    shards = sum(local_tensor(parameter).nbytes for parameter in policy.parameters())
    weights = {name: gather_full(tensor.detach()) for name, tensor in policy.weights().items()} if job.steps else {}
    return {"weights": weights, "norms": norms, "loading_kb": loaded, "shard_bytes": shards, "names": names}


def main(folder: str, rank: int, text: str) -> None:
    """One rank; `text` is its job as JSON, and `RANK.pt` of the folder its result."""
    job = msgspec.json.decode(text, type=Job)
    torch.set_num_threads(1)
    group = ActorGroup(rank, job.size, torch.device("cpu"), 120.0, job.trainer)
    if job.size > 1:
        group.connect(FileStore(f"{folder}/store", job.size))
    torch.save(train(job, group), f"{folder}/{rank}.pt")
    group.close()
