"""Trajectories move between rollouts: the results do not change, and each row ends exactly once, even if a rollout dies."""

import math
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.policies import random_prompts, tiny_policy
from support.rollout_play import FAST_LINK, PARAMS, SAMPLES, EngineGenerator, Play

from headrace.comm.errors import MessageRefused
from headrace.comm.memfd import HEAD_BYTES, open_memory
from headrace.comm.messages import RowId
from headrace.comm.messages.migration import (
    ClaimResult,
    RowsReassigned,
    TransferOffered,
    TransferRefused,
)
from headrace.launch.report.timeline import Timeline
from headrace.rollout import Engine, SamplingParams
from headrace.rollout.engine.sequence import Completion, SequenceState
from headrace.rollout.environments.base import Episode
from headrace.rollout.leased_row import LeasedRow
from headrace.rollout.migration.calibration import TransferCostModel, batch_bound, calibrate
from headrace.rollout.migration.codec import MovedRow, decode_rows, encode_rows
from headrace.rollout.migration.migration import MoveDeadlines

PAGE_BYTES = 64 * 512


# ------------------------------------------------------------------------------------------------- engines alone


def test_a_trajectory_that_is_a_new_engines_first_work_is_returned_when_it_ends(llama: Path):
    source, target = Engine(llama, exact=True), Engine(llama, exact=True)
    source.add_group([5] * 20, PARAMS, [0])
    source.step()
    target.import_sequences(source.export_sequences([0]))
    target.add_group([6] * 20, PARAMS, [1])
    assert {done.trajectory_id for done in run(target)} == {0, 1}


@pytest.mark.parametrize(
    ("dtype", "with_cache"),
    [("float32", False), ("float32", True), ("bfloat16", None)],
    ids=["prefill", "pages", "either"],
)
def test_moves_do_not_change_a_bit_of_a_trajectory(llama: Path, dtype: str, with_cache: bool | None):
    prompts, draw = random_prompts(8, longest=100), random.Random(3)
    long = SamplingParams(max_new_tokens=70, ignore_eos=True)
    still = Engine(llama, dtype, exact=True)
    for index, prompt in enumerate(prompts):
        still.add_group(prompt, long, [2 * index, 2 * index + 1])
    stayed = {done.trajectory_id: done for done in run(still)}

    page_bytes = PAGE_BYTES * getattr(torch, dtype).itemsize // 4
    engines = [Engine(llama, dtype, exact=True, kv_gb=size * page_bytes / 1e9, max_running=6) for size in (7, 9, 12)]
    for index, prompt in enumerate(prompts):
        engines[index % 3].add_group(prompt, long, [2 * index, 2 * index + 1])
    moved: dict[int, Completion] = {}
    num_moves = 0
    while any(not engine.idle for engine in engines):
        source, target = draw.sample(engines, 2)
        ids = [live.trajectory_id for live in source.unfinished()]
        if ids and draw.random() < 0.2:
            with_pages = draw.random() < 0.5 if with_cache is None else with_cache
            states = source.export_sequences(draw.sample(ids, draw.randint(1, min(3, len(ids)))), with_pages)
            target.import_sequences([sent_and_received(state) for state in states])
            num_moves += len(states)
        for engine in engines:
            moved |= {done.trajectory_id: done for done in engine.step()}
    assert num_moves > 20 and sum(engine.scheduler.num_preempted for engine in engines) > 0
    assert moved == stayed


def sent_and_received(state: SequenceState) -> SequenceState:
    held = LeasedRow(RowId(1, 2, 3), 1, 0, {"prompt": "x"})
    (row,) = decode_rows(np.concatenate(encode_rows([MovedRow(held, state)])))
    assert row.held == held
    return row.state


def test_a_row_of_any_values_that_json_has_moves_unchanged(llama: Path):
    engine = Engine(llama)
    engine.add_group([5, 6, 7], PARAMS, [1])
    engine.step()
    row = {"prompt": [{"role": "user", "content": "x", "id": -(10**30)}], "answer": 10**30, "mean": 0.1, "none": None}
    episode = Episode(row["prompt"], state={"seed": 2**80})
    held = LeasedRow(RowId(1, 2, 3), 4, 5, row, episode=episode, switches=[(3, 6)], digests={5: "d5", 6: "d6"})
    (moved,) = decode_rows(np.concatenate(encode_rows([MovedRow(held, *engine.export_sequences([1]))])))
    assert moved.held == held


def run(engine: Engine) -> list[Completion]:
    completions: list[Completion] = []
    while not engine.idle:
        completions += engine.step()
    return completions


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_malformed_payload_is_refused(tmp_path: Path, family: str):
    engine = Engine(tiny_policy(tmp_path, family))
    engine.add_group([5, 6, 7], PARAMS, [1])
    engine.step()
    states = engine.export_sequences([1], with_cache=True)
    payload = np.concatenate(encode_rows([MovedRow(LeasedRow(RowId(1, 0, 0), 1, 0, {}), state) for state in states]))
    (found,) = decode_rows(payload)
    assert (found.state.states is None) == (family == "llama")
    if found.state.states is not None and states[0].states is not None:
        assert torch.equal(found.state.states, states[0].states)
    for broken in (payload[:5], payload[:40], payload[:-1], payload[8:], np.zeros(64, np.uint8)):
        with pytest.raises(MessageRefused, match="malformed (frame|payload)"):
            decode_rows(broken)


# ----------------------------------------------------------------------------------------------------- costs


def test_at_the_batch_bound_a_step_takes_a_quarter_longer():
    assert batch_bound([(1, 1.0), (2, 1.0), (4, 1.1), (8, 1.4), (16, 3.0)]) == 6
    assert batch_bound([(1, 1.0), (2, 1.2)]) == 2
    assert batch_bound([(1, 1.0), (2, 2.0)]) == 1
    assert batch_bound([(1, 1.3), (2, 1.0), (4, 1.25)]) == 4


def test_measuring_leaves_the_generator_as_it_was_and_stops_where_the_cache_ends(llama: Path):
    for kv_pages in (8, 300):
        replica = EngineGenerator(llama, kv_gb=kv_pages * PAGE_BYTES / 1e9)
        speeds = calibrate(replica, 32)
        assert 1 <= speeds.batch_bound <= min(32, kv_pages) and speeds.prefill_s > 0
        replica.check()
        assert replica.idle and replica.pool.num_free == replica.pool.num_pages - 1


def test_the_cache_moves_while_that_costs_less_than_computing_it():
    costs = TransferCostModel()
    assert costs.should_send_cache(True, 1000, prefill_s=1e-6)
    costs.record(True, num_bytes=10**6, seconds=1.0)
    assert not costs.should_send_cache(True, 1000, prefill_s=1e-3)
    assert costs.should_send_cache(True, 1000, prefill_s=3e-3)
    assert costs.should_send_cache(False, 1000, prefill_s=1e-3)


# --------------------------------------------------------------------------------------------- rollouts and a hub


Stage = Callable[..., Play]


@pytest.fixture
def stage(tmp_path: Path, llama: Path) -> Stage:
    """Makes a `Play`."""
    return lambda name="play", **options: Play(tmp_path / name, llama, **options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> dict[RowId, float]:
    """The results of a run in which nothing moves."""
    play = Play(tmp_path_factory.mktemp("undisturbed") / "play", llama, ("here",))
    try:
        play.lease(play.rollouts[0])
        return play.finish()
    finally:
        play.close()


@pytest.mark.parametrize("hosts", [("here", "here"), ("here", "there")], ids=["shared memory", "link"])
@pytest.mark.parametrize("prefill_s", [math.inf, 0.0], ids=["pages", "prefill"])
def test_moved_trajectories_end_as_if_they_had_stayed(
    stage: Stage, undisturbed: dict[RowId, float], hosts: tuple[str, ...], prefill_s: float
):
    play = stage(hosts=hosts, prefill_s=prefill_s)
    source, target = play.rollouts
    play.lease(source)
    play.step(10)
    play.order(source, target)
    assert source.generator.idle and len(source.migration.held()) == SAMPLES
    play.until(lambda: target.generator.num_running == SAMPLES)
    assert play.finish() == undisturbed
    (ended,) = play.ended
    assert ended.num_rows == SAMPLES and not ended.refusal and play.hub.state.num_moved == SAMPLES
    assert (ended.num_bytes > 10_000) == (prefill_s > 0)
    play.close()
    (move,) = [span for span in Timeline.read(play.path.parent).spans[source.name] if span.state == "move"]
    assert (move.facts["to"], move.facts["rows"]) == (target.name, SAMPLES)


@pytest.mark.parametrize("reason", ["version", "full", "unable", "broken"])
def test_refused_trajectories_return_and_the_reason_is_counted(
    stage: Stage, undisturbed: dict[RowId, float], reason: str
):
    play = stage()
    source, target, _ = play.rollouts
    play.lease(source)
    match reason:
        case "version":
            target.generator.weights.version = 1
        case "full":
            target.generator.kv_capacity = 60
        case "unable":
            target.migration.profile = None
    play.order(source, target)
    if reason == "broken":
        (move,) = source.migration.pending.values()
        fd = open_memory(move.transfer.path)
        os.pwrite(fd, bytes(move.transfer.num_bytes), HEAD_BYTES)
        os.close(fd)
    assert play.finish() == undisturbed
    assert play.hub.repacking.refusals == {reason: 1} and play.hub.state.num_moved == 0


def test_an_order_that_is_impossible_is_refused_with_its_reason(stage: Stage):
    play = stage()
    source, target, third = play.rollouts
    play.order(source, target)
    play.lease(source)
    play.order(source, target, version=3)
    third.fleet.leave()
    play.order(source, third)
    source.migration.profile = None
    play.order(source, target)
    play.step()
    assert [ended.refusal for ended in play.ended] == ["nothing left", "version", "gone", "unable"]
    play.finish()


@pytest.mark.parametrize("lost", [TransferOffered, TransferRefused, ClaimResult, RowsReassigned])
def test_a_lost_message_costs_time_and_nothing_else(stage: Stage, undisturbed: dict[RowId, float], lost: type):
    play = stage(deadlines=MoveDeadlines(repeat_s=0.05, offer_s=0.2))
    source, target, _ = play.rollouts
    play.lease(source)
    if lost is TransferRefused:
        target.generator.weights.version = 1
    for rollout in (source, target):
        rollout.loses = {lost}
    play.order(source, target)
    assert play.finish() == undisturbed
    assert any(lost not in rollout.loses for rollout in (source, target)), "nothing was lost"


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("victim", ["source", "destination"])
def test_a_rollout_that_dies_during_a_move_costs_no_row(
    stage: Stage, undisturbed: dict[RowId, float], victim: str, turns: int
):
    play = stage()
    source, target, third = play.rollouts
    play.lease(source)
    play.order(source, target)
    for _ in range(turns):  # one message of the hub or one step of the destination at a time
        target.step()
        if (envelope := play.hub.mailbox.receive(0)) is not None:
            assert play.hub.handle(envelope)
    dead = source if victim == "source" else target
    play.kill(dead)
    survivor = target if dead is source else source
    play.until(lambda: not survivor.migration.is_under_way)
    if play.hub.state.unassigned:
        play.lease(third)
    assert play.finish() == undisturbed


def test_the_destinations_claim_wins_over_a_source_that_takes_back_too_early(
    stage: Stage, undisturbed: dict[RowId, float]
):
    play = stage()
    source, target, _ = play.rollouts
    play.lease(source)
    play.order(source, target)
    while not target.generator.num_running:
        target.step()  # it has the trajectories, and its claim is in the hub's inbox
    (number,) = source.migration.pending
    source.migration.handle(target.name, TransferRefused(number, "silent"))
    assert source.generator.num_waiting == SAMPLES
    play.step(3)
    assert source.generator.idle and not source.leases.held and play.hub.state.num_moved == SAMPLES
    assert play.finish() == undisturbed


def test_random_moves_end_every_row_once_with_unchanged_tokens(stage: Stage):
    outcomes = []
    for has_moves in (False, True):
        play = stage(str(has_moves), hosts=("here", "here", "there"), prefill_s=1e-4, deadlines=FAST_LINK)
        draw = random.Random(7)
        for rollout in play.rollouts:
            play.lease(rollout, num_groups=2)
        while has_moves and any(not rollout.generator.idle for rollout in play.rollouts):
            source, target = draw.sample(play.rollouts, 2)
            play.order(source, target)
            play.step(draw.randint(1, 3))
        outcomes.append(sorted(play.finish().values()))
        assert (play.hub.state.num_moved > 20) == has_moves
    assert outcomes[0] == outcomes[1]
