"""A replica of two ranks: as threads over Gloo within a whole system, and as processes that die together."""

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.job import MakeJob, assert_account_adds_up, child_of
from support.policies import random_prompts, tiny_policy
from support.system import System

from headrace.comm.errors import PeerGone, SettingError
from headrace.comm.recipe import RoleSettings
from headrace.launch.config.checks import check_recipe, check_tp
from headrace.launch.config.load import read_recipe
from headrace.launch.config.model_files import ModelFiles
from headrace.launch.placement import place_ranks
from headrace.rollout import Engine, SamplingParams
from headrace.rollout.generators import builtin
from headrace.rollout.tensor_parallel.calls import Add, Call, Cancel, ImportSequence, decode, encode
from headrace.rollout.tensor_parallel.lockstep import LeadEngine, close_together, run_follower
from headrace.rollout.tensor_parallel.replica import TensorParallelGroup
from headrace.trainer.policy.model import load_policy, load_tokenizer
from headrace.trainer.policy.tensor_parallel import TensorParallel


def two_ranks(patience_s: float = 240) -> Callable[[int], TensorParallelGroup]:
    """Gives each of two threads its end of a replica."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]

    def end(rank: int) -> TensorParallelGroup:
        group: Any = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=patience_s))
        return TensorParallelGroup(group, ["rollout-0", "shard-0"])

    return end


def on_two_ranks(path: Path, lead: Callable[[Engine], Any]) -> tuple[Any, Engine]:
    """What `lead` returns, run with the engine of rank 0, and the engine of rank 1 at the end."""
    end = two_ranks()

    def run(rank: int) -> Any:
        replica = end(rank)
        policy = load_policy(path, tensor_parallel=replica.tensor_parallel)
        options: dict[str, Any] = {"max_running": 4, "tokenizer": load_tokenizer(path)}
        engine = Engine(policy, **options) if rank else LeadEngine(replica, policy, **options)
        if rank:
            run_follower(replica, engine, weights=None)  # pyright: ignore[reportArgumentType] - there is no new version
            return engine
        result = lead(engine)
        close_together(replica)
        return result

    with ThreadPoolExecutor(2) as ranks:
        result, other = ranks.map(run, range(2))
        return result, other


def drain(engine: Engine) -> dict[int, list[int]]:
    found = {}
    while not engine.idle:
        found |= {c.trajectory_id: c.token_ids for c in engine.step()}
    return found


def a_mixed_hour(engine: Engine) -> dict[int, list[int]]:
    """Groups come late, some are cancelled, paused, told more, taken out and put in again."""
    prompts, params = random_prompts(4, longest=80), SamplingParams(max_new_tokens=25, ignore_eos=True)
    engine.add_group(prompts[0], params, [1, 2, 3])
    found = {c.trajectory_id: c.token_ids for _ in range(4) for c in engine.step()}
    engine.add_group(prompts[1], [params, SamplingParams(max_new_tokens=9, stop="a")], [4, 5])
    assert engine.cancel(2) and engine.pause(3)
    engine.step()
    parcels = engine.export_sequences([1, 4])
    engine.add_group(prompts[2], params, [6])
    engine.resume(3, [7, 8, 9])
    engine.import_sequences(parcels)
    return found | drain(engine)


def test_two_ranks_in_lock_step_do_what_one_engine_does(tmp_path: Path):
    path = tiny_policy(tmp_path)
    alone = Engine(path, max_running=4)
    expected = a_mixed_hour(alone)
    found, other = on_two_ranks(path, a_mixed_hour)
    assert found == expected and sorted(found) == [1, 3, 4, 5, 6]
    other.check()
    assert other.idle and other.pool.num_free == other.pool.num_pages - 1


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_a_rank_holds_its_part_of_every_layer_alone(tmp_path: Path, family: str):
    path = tiny_policy(tmp_path, family)
    whole = load_policy(path)
    layers = [sum(w.numel() for n, w in whole.weights().items() if "layers" in n and w.dim() == 2)]
    for rank in range(2):
        shard = TensorParallel()
        shard.rank, shard.size = rank, 2
        part = load_policy(path, tensor_parallel=shard)
        layers.append(sum(w.numel() for n, w in part.weights().items() if "layers" in n and w.dim() == 2))
        assert part.weights().keys() == whole.weights().keys()
    assert layers[1] == layers[2] == layers[0] / 2


def test_calls_survive_the_wire_whatever_their_length():
    params = SamplingParams(temperature=0.3, stop=("a", 7))
    calls: list[Call] = [
        Add(list(range(3000)), [params, SamplingParams()], [1 << 62, 4], [0, 1]),
        Cancel(5),
        ImportSequence(5, -(1 << 62), params, [1], [2, 3]),
    ]
    sent = decode(encode(calls))
    assert [type(call) for call in sent] == [Add, Cancel, ImportSequence]
    assert isinstance(sent[0], Add) and sent[0].params[0].stops == ("a", 7) and sent[0].prompt_ids[-1] == 2999
    assert sent[2] == calls[2] or isinstance(sent[2], ImportSequence) and sent[2].key == -(1 << 62)
    end = two_ranks()

    def run(rank: int) -> int:
        replica = end(rank)
        if rank:
            return sum(len(replica.receive()) for _ in range(3))
        for told in (calls, calls[1:], []):
            for call in told:
                replica.enqueue(call)
            replica.flush()
        return 0

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(run, range(2))) == [0, 5]


def test_a_rank_that_is_gone_is_named():
    end = two_ranks()

    def run(rank: int) -> None:
        replica = end(rank)
        replica.all_agree(True)
        if rank:
            del replica.group, replica.tensor_parallel
            return
        with pytest.raises(PeerGone, match="one of rollout-0, shard-0 is gone"):
            while True:
                replica.all_agree(True)

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(run, range(2)))


def test_a_whole_system_runs_with_a_replica_of_two_ranks(tmp_path: Path):
    system = System(tmp_path, **{"roles.rollout": 2, "rollout.tp": 2, "queue.max_staleness": 0})
    system.start("shard", builtin.run)
    system.start_all(num_rollouts=1)
    summary = system.wait()
    assert (summary["status"], summary["steps"], summary["accounting"]["holds"]) == ("finished", 3, True)
    lines = [json.loads(line) for line in (system.dir / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and max(line["mismatch/logprob_abs_diff"] for line in lines) < 2e-6


def test_ranks_are_dealt_out_replica_by_replica():
    places = place_ranks(RoleSettings(actor=1, relay=1, rollout=6), world_size=8, ranks_per_host=8, tp=3)
    names = ["actor-0", "rollout-0", "shard-0", "shard-1", "rollout-1", "shard-2", "shard-3", "relay-0"]
    assert [place.name for place in places] == names
    with pytest.raises(SettingError, match=r"rollout\.tp=2: the ranks of rollout-0 would be on two hosts"):
        place_ranks(RoleSettings(actor=1, relay=2, rollout=4), world_size=7, ranks_per_host=3, tp=2)
    with pytest.raises(SettingError, match=r"roles\.rollout=3 is not a multiple of rollout\.tp=2"):
        check_recipe(read_recipe(None, ["roles.rollout=3", "rollout.tp=2"]))


def test_what_cannot_be_split_is_refused_before_anything_starts(tmp_path: Path):
    recipe = read_recipe(None, ["roles.rollout=2", "rollout.tp=2"])
    check_tp(recipe, ModelFiles.read(str(tiny_policy(tmp_path))))
    with pytest.raises(SettingError, match=r"rollout\.tp: model type 'gemma2' runs on one rank only"):
        check_tp(recipe, ModelFiles.read(str(tiny_policy(tmp_path, "gemma2"))))
    recipe = read_recipe(None, ["roles.rollout=2", "rollout.tp=2", "generator.exact=true"])
    with pytest.raises(SettingError, match=r"rollout\.tp: not with generator\.exact"):
        check_recipe(recipe)


@pytest.mark.slow
def test_a_replica_that_loses_a_rank_starts_again_as_a_whole(job: MakeJob):
    run = job(run__steps=40, rollout__tp=2).start()
    run.wait_for_step(1)
    os.kill(child_of(run, "shard-0"), signal.SIGKILL)
    code, output = run.end()
    assert code == 0, output + run.logs()
    assert "shard-0 was ended by SIGKILL and is started again" in output
    assert "rollout-0 ended with exit code 1 and is started again" in output
    assert "is gone" in (run.dir / "logs/rollout-0.log").read_text()
    assert assert_account_adds_up(run)["trained"] == 40 * 16
