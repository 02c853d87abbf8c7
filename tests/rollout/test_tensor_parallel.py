"""A replica of two ranks: as threads over Gloo in a whole system, and as processes that end together."""

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
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
from headrace.launch.config.checks.recipe import check_recipe, check_tp
from headrace.launch.config.hosts import equal_hosts
from headrace.launch.config.load import read_recipe
from headrace.launch.config.model_files import ModelFiles
from headrace.launch.placement import place_ranks
from headrace.rollout import Engine, SamplingParams
from headrace.rollout.engine.sequence import SequenceState
from headrace.rollout.generators import builtin
from headrace.rollout.tensor_parallel.calls import Add, Call, Cancel, ImportSequence, decode, encode
from headrace.rollout.tensor_parallel.lockstep import LeadEngine, run_follower
from headrace.rollout.tensor_parallel.replica import TensorParallelGroup
from headrace.trainer.policy.model import load_policy, load_tokenizer
from headrace.trainer.policy.tensor_parallel import TensorParallel


def two_ranks(timeout_s: float = 240) -> Callable[[int], TensorParallelGroup]:
    """A function that opens the group of one of two ranks, each in a thread of its own."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]

    def end(rank: int) -> TensorParallelGroup:
        group: Any = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout_s))
        return TensorParallelGroup(group, ["rollout-0", "shard-0"])

    return end


def on_two_ranks(path: Path, work: Callable[[Engine], Any]) -> tuple[Any, Engine]:
    """The result of `work` with the engine of rank 0, and the engine of rank 1 at the end."""
    open_group = two_ranks()

    def run(rank: int) -> Any:
        replica = open_group(rank)
        policy = load_policy(path, tensor_parallel=replica.tensor_parallel)
        weights: Any = None  # no new version comes
        if rank:
            engine = Engine(policy, max_running=4, tokenizer=load_tokenizer(path))
            run_follower(replica, engine, weights)
            return engine
        lead = LeadEngine(replica, weights, policy, max_running=4, tokenizer=load_tokenizer(path))
        result = work(lead)
        lead.close()
        return result

    with ThreadPoolExecutor(2) as ranks:
        result, other = ranks.map(run, range(2))
        return result, other


def mixed_calls(engine: Engine) -> dict[int, list[int]]:
    """Tokens by trajectory. Groups come late; some trajectories are cancelled, paused, extended, exported and imported."""
    prompts, params = random_prompts(4, longest=80), SamplingParams(max_new_tokens=25, ignore_eos=True)
    engine.add_group(prompts[0], params, [1, 2, 3])
    found = {c.trajectory_id: c.token_ids for _ in range(4) for c in engine.step()}
    engine.add_group(prompts[1], [params, SamplingParams(max_new_tokens=9, stop="a")], [4, 5])
    assert engine.export_sequences([2]) and engine.pause(3)
    engine.step()
    states = engine.export_sequences([1, 4])
    engine.add_group(prompts[2], params, [6, 7])
    engine.resume(3, [7, 8, 9])
    engine.import_sequences(states)
    found |= {c.trajectory_id: c.token_ids for c in engine.step()}
    assert engine.cancel(7) and not engine.cancel(9)
    while not engine.idle:
        found |= {c.trajectory_id: c.token_ids for c in engine.step()}
    return found


def test_two_ranks_in_lock_step_do_what_one_engine_does(tmp_path: Path):
    path = tiny_policy(tmp_path)
    alone = Engine(path, max_running=4)
    expected = mixed_calls(alone)
    found, other = on_two_ranks(path, mixed_calls)
    assert found == expected and sorted(found) == [1, 3, 4, 5, 6]
    other.check()
    assert other.idle and other.pool.num_free == other.pool.num_pages - 1


def refused_calls(engine: Engine) -> list[str]:
    """The messages of the calls that one rank alone would make."""
    calls: list[Callable[[], object]] = [
        lambda: engine.generate([[5, 6]]), lambda: engine.stream([[5, 6]]), lambda: engine.bind({}),
        engine.weights_changed, engine.recompute,
    ]  # fmt: skip
    messages: list[str] = []
    for call in calls:
        with pytest.raises(SettingError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_what_the_other_ranks_do_not_repeat_is_refused(tmp_path: Path):
    messages, other = on_two_ranks(tiny_policy(tmp_path), refused_calls)
    names = ("generate and stream", "generate and stream", "bind", "weights_changed", "recompute")
    assert messages == [f"rollout.tp=2: {name} would act on the first rank alone" for name in names]
    assert other.idle


def test_an_export_of_nothing_leaves_the_step_unread_as_on_the_other_ranks(tmp_path: Path):
    replica = TensorParallelGroup(None, ["rollout-0"])
    replica.size = 2
    replica.flush = lambda: None
    weights: Any = None
    lead = LeadEngine(replica, weights, load_policy(tiny_policy(tmp_path)))
    lead._is_async = True
    lead.add_group([5, 6], SamplingParams(stop=range(128)), [1])
    assert lead.step() == [] and lead.export_sequences([]) == [] and lead.num_running == 1
    assert [done.trajectory_id for done in lead.step()] == [1]


def repeated_prompts(engine: Engine) -> list[list[int]]:
    """Tokens of trajectories, one after the other, whose prompts begin alike."""
    found = []
    for trajectory_id in range(3):
        prompt = [*range(5, 90), trajectory_id, *range(9, 60)]
        engine.add_group(prompt, SamplingParams(max_new_tokens=5, ignore_eos=True), [trajectory_id])
        while not engine.idle:
            found += [c.token_ids for c in engine.step()]
    return found


def test_two_ranks_find_the_same_pages_in_their_prefix_caches(tmp_path: Path):
    path = tiny_policy(tmp_path)
    alone = Engine(path, max_running=4)
    expected = repeated_prompts(alone)
    found, other = on_two_ranks(path, repeated_prompts)
    assert found == expected
    assert other.scheduler.prefixes.num_found == alone.scheduler.prefixes.num_found == 2 * 64


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_a_rank_holds_only_its_part_of_every_layer(tmp_path: Path, family: str):
    path = tiny_policy(tmp_path, family)
    whole = load_policy(path)
    layers = [sum(w.numel() for n, w in whole.weights().items() if "layers" in n and w.dim() == 2)]
    for rank in range(2):
        tensor_parallel = TensorParallel()
        tensor_parallel.rank, tensor_parallel.size = rank, 2
        part = load_policy(path, tensor_parallel=tensor_parallel)
        layers.append(sum(w.numel() for n, w in part.weights().items() if "layers" in n and w.dim() == 2))
        assert part.weights().keys() == whole.weights().keys()
    assert layers[1] == layers[2] == layers[0] / 2


def test_calls_of_any_length_arrive_as_they_were_sent():
    params = SamplingParams(temperature=0.3, stop=("a", 7))
    calls: list[Call] = [
        Add(list(range(3000)), [params, SamplingParams()], [1 << 62, 4]),
        Cancel(5),
        ImportSequence(SequenceState(5, -(1 << 62), params, [1], [2, 3], [], None, 1, True)),
    ]
    sent = decode(encode(calls))
    assert [type(call) for call in sent] == [Add, Cancel, ImportSequence]
    assert isinstance(sent[0], Add) and sent[0].params[0].stops == ("a", 7) and sent[0].prompt_ids[-1] == 2999
    assert isinstance(sent[2], ImportSequence) and isinstance(calls[2], ImportSequence)
    assert asdict(sent[2].state) | {"params": params} == asdict(calls[2].state) | {"params": params}
    open_group = two_ranks()

    def run(rank: int) -> int:
        replica = open_group(rank)
        if rank:
            return sum(len(replica.receive()) for _ in range(3))
        for batch in (calls, calls[1:], []):
            for call in batch:
                replica.enqueue(call)
            replica.flush()
        return 0

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(run, range(2))) == [0, 5]


def test_a_rank_that_is_gone_is_named():
    open_group = two_ranks()

    def run(rank: int) -> None:
        replica = open_group(rank)
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


def test_ranks_are_assigned_replica_by_replica():
    places = place_ranks(RoleSettings(actor=1, relay=1, rollout=6), equal_hosts(8, 8), tp=3)
    names = ["actor-0", "rollout-0", "shard-0", "shard-1", "rollout-1", "shard-2", "shard-3", "relay-0"]
    assert [place.name for place in places] == names
    with pytest.raises(SettingError, match=r"rollout\.tp=2: the ranks of rollout-0 would be on two hosts"):
        place_ranks(RoleSettings(actor=1, relay=2, rollout=4), equal_hosts(7, 3), tp=2)
    with pytest.raises(SettingError, match=r"roles\.rollout=3 is not a multiple of rollout\.tp=2"):
        check_recipe(read_recipe(None, ["roles.rollout=3", "rollout.tp=2"]))


def test_a_policy_that_cannot_be_split_is_refused_before_anything_starts(tmp_path: Path):
    check_tp(2, ModelFiles.read(str(tiny_policy(tmp_path))))
    with pytest.raises(SettingError, match=r"rollout\.tp: model type 'gemma2' runs on one rank only"):
        check_tp(2, ModelFiles.read(str(tiny_policy(tmp_path, "gemma2"))))
    recipe = read_recipe(None, ["roles.rollout=2", "rollout.tp=2", "generator.exact=true"])
    with pytest.raises(SettingError, match=r"rollout\.tp cannot be combined with generator\.exact"):
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
