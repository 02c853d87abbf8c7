"""Gradients that ranks sum once for an update are those that they sum in each micro-batch."""

from pathlib import Path

import pytest
from support import forks
from support.actors import DEADLINE_S, TESTS, on_two_ranks
from support.policies import tiny_policy

from headrace.comm.recipe import LoraSettings, ModelSettings, Recipe, RoleSettings, TrainerSettings
from headrace.trainer.memory import PolicySizes, wants_one_sum

SIZES = PolicySizes.of(
    {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    }
)  # fmt: skip

RANK = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from torch.distributed import FileStore
from support.actors import *
from headrace.comm.recipe import TrainerSettings
from headrace.launch.processes.role_process import end_process
from headrace.trainer import actor_group
from headrace.trainer.actor_group import gather_full
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
folder, rank, size, shards = sys.argv[2], *map(int, sys.argv[3:6])
torch.set_num_threads(1)
group = ActorGroup(rank, size, torch.device("cpu"), DEADLINE_S, TrainerSettings(shard_ranks=shards))
group.connect(FileStore(folder + "/store", size))
sums, reduce = [], _fsdp_param_group.foreach_reduce
def counted(*arguments, **options):
    sums.append(1)
    return reduce(*arguments, **options)
_fsdp_param_group.foreach_reduce = counted

def train_two_steps(sums_once):
    actor_group.wants_one_sum = lambda *_: sums_once
    recipe = recipe_of(folder + "/qwen2", **{"optimizer.eps": 1.0, "optimizer.lr": 0.5, "batch.prompts_per_step": 8,
                                             "batch.updates_per_version": 2})
    actor = actor_of(recipe, group)
    sums.clear()
    norms = []
    for step in range(2):
        batches = [batch_of(step, first=first, num_groups=4, total=8, group=group) for first in (0, 4)]
        norms.append(train(actor, batches)["actor/grad_norm"])
    return norms, [gather_full(p.detach()) for p in actor.policy.parameters()], len(sums)

def train_after_a_discarded_batch(is_begun):
    actor_group.wants_one_sum = lambda *_: True
    actor = actor_of(recipe_of(folder + "/qwen2", **{"batch.prompts_per_step": 8}), group)
    if is_begun:
        actor.accumulate(batch_of(9, num_groups=4, total=8, group=group), StepMetrics())
        actor.discard()
    return train(actor, [batch_of(0, num_groups=8, total=8, group=group)])["actor/grad_norm"]

assert train_after_a_discarded_batch(True) == train_after_a_discarded_batch(False)
(norms, weights, many), (own_norms, own_weights, few) = train_two_steps(False), train_two_steps(True)
assert all(abs(a - b) < 1e-6 * a for a, b in zip(norms, own_norms)), (norms, own_norms)
assert all((a - b).abs().max() < 1e-6 for a, b in zip(weights, own_weights))
assert few == 4 * 3 < many, (few, many)  # updates times groups of parameters: two layers and the rest
group.close()
end_process(0)
"""


@pytest.mark.parametrize(
    ("size", "shards"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)], ids=["two", "two by two"]
)
def test_gradients_are_summed_once_for_an_update_where_there_is_room_and_can_be_discarded(
    tmp_path: Path, size: int, shards: int
):
    tiny_policy(tmp_path, "qwen2")
    ranks = [forks.start(RANK, [TESTS, tmp_path, rank, size, shards]) for rank in range(size)]
    for rank in ranks:
        rank.join(DEADLINE_S)
    assert [rank.exitcode for rank in ranks] == [0] * size


@pytest.mark.parametrize(
    ("ranks", "settings", "gigabytes", "num_processes", "expected"),
    [
        (8, {}, 141, 1, True),
        (8, {}, 141, 2, False),
        (8, {}, 80, 1, False),
        (2, {}, 80, 1, False),
        (1, {}, 800, 1, False),
        (8, {}, None, 1, False),
        (8, {"trainer": TrainerSettings(offload=True)}, 80, 1, False),
        (2, {"lora": LoraSettings(rank=8)}, 80, 1, True),
    ],
)
def test_whole_gradients_are_kept_where_the_estimate_leaves_room_for_them(
    ranks, settings, gigabytes, num_processes, expected
):
    recipe = Recipe(model=ModelSettings(dtype="bfloat16"), roles=RoleSettings(actor=ranks), **settings)
    assert wants_one_sum(SIZES, recipe, gigabytes and gigabytes * 1e9, num_processes) is expected


DIFFERENT_GPUS = """
import os
group.device = torch.device("cuda")
torch.cuda.mem_get_info = lambda _: (0, [80 << 30, 40 << 30][group.rank])
os.environ["HEADRACE_GPU_PROCESSES"] = "21"[group.rank]
assert group.smallest_gpu() == (40 << 30, 2)
group.device = torch.device("cpu")
assert group.smallest_gpu() == (None, 1)
"""


def test_ranks_decide_by_the_smallest_of_their_gpus(tmp_path: Path):
    on_two_ranks(tmp_path, DIFFERENT_GPUS)
