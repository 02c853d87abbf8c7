"""Trajectories move between rollouts: nobody sees it in the result, and each ends exactly once whoever dies meanwhile."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from support.policies import random_prompts, tiny_policy

from headrace.comm.clock import Clock
from headrace.comm.errors import MessageRefused
from headrace.comm.in_memory import MemoryFleet, MemoryNetwork
from headrace.comm.messages import LeaseGrant, LeaseRequest, RowDone, RowId
from headrace.comm.messages.migration import (
    ClaimResult,
    MigrateOrder,
    MigrateResult,
    RowsReassigned,
    TransferOffered,
    TransferRefused,
)
from headrace.comm.recipe import BatchSettings, QueueSettings, RepackSettings
from headrace.comm.trace import Trace
from headrace.launch.report.timeline import Timeline
from headrace.relay.dataset import JsonLines, PromptPool
from headrace.relay.hub.hub import Hub
from headrace.relay.journal import events as ev
from headrace.relay.journal.journal import Journal, read_events, replay
from headrace.relay.journal.state import HubState, RowStatus
from headrace.relay.queue.admission import Admission
from headrace.relay.weights.slots import Receipt
from headrace.rollout import Engine, SamplingParams
from headrace.rollout.engine.sequence import Completion, SequenceState
from headrace.rollout.generators.base import Weights
from headrace.rollout.leases import HeldLeases, LeasedRow
from headrace.rollout.migration import migration
from headrace.rollout.migration import transport as carriage
from headrace.rollout.migration.calibration import GeneratorProfile, TransferCostModel, batch_bound, calibrate
from headrace.rollout.migration.codec import MovedRow, decode_rows, encode_rows
from headrace.rollout.migration.migration import Migration
from headrace.rollout.pacing import RolloutPacing

PAGE_BYTES = 64 * 512
PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True)
SAMPLES = 3


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"))


# ------------------------------------------------------------------------------------------------- it cannot be seen


@pytest.mark.parametrize(
    ("dtype", "with_cache"),
    [("float32", False), ("float32", True), ("bfloat16", None)],
    ids=["prefill", "pages", "either"],
)
def test_however_often_trajectories_move_not_a_bit_of_them_changes(llama: Path, dtype: str, with_cache: bool | None):
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
            parcels = source.export_sequences(draw.sample(ids, draw.randint(1, min(3, len(ids)))), with_pages)
            target.import_sequences([sent_and_received(parcel) for parcel in parcels])
            num_moves += len(parcels)
        for engine in engines:
            moved |= {done.trajectory_id: done for done in engine.step()}
    assert num_moves > 20 and sum(engine.scheduler.num_preempted for engine in engines) > 0
    assert moved == stayed


def sent_and_received(state: SequenceState) -> SequenceState:
    held = LeasedRow(RowId(1, 2, 3), 1, 0, {"prompt": "x"})
    (traveller,) = decode_rows(np.concatenate(encode_rows([MovedRow(held, state)])))
    assert traveller.held == held
    return traveller.state


def run(engine: Engine) -> list[Completion]:
    completions: list[Completion] = []
    while not engine.idle:
        completions += engine.step()
    return completions


def test_a_malformed_payload_is_refused(llama: Path):
    engine = Engine(llama)
    engine.add_group([5, 6, 7], PARAMS, [1])
    engine.step()
    parcels = engine.export_sequences([1], with_cache=True)
    freight = np.concatenate(encode_rows([MovedRow(LeasedRow(RowId(1, 0, 0), 1, 0, {}), parcel) for parcel in parcels]))
    assert len(decode_rows(freight)) == 1
    for broken in (freight[:5], freight[:40], freight[:-1], freight[8:], np.zeros(64, np.uint8)):
        with pytest.raises(MessageRefused, match="no freight"):
            decode_rows(broken)


# ----------------------------------------------------------------------------------------------------- what it costs


def test_the_batch_bound_is_where_a_step_takes_a_quarter_longer():
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


def test_pages_travel_while_that_costs_less_than_computing_them():
    costs = TransferCostModel("auto")
    assert costs.should_send_cache(True, 1000, prefill_s=1e-6)
    costs.record(True, num_bytes=10**6, seconds=1.0)
    assert not costs.should_send_cache(True, 1000, prefill_s=1e-3)
    assert costs.should_send_cache(True, 1000, prefill_s=3e-3)
    assert costs.should_send_cache(False, 1000, prefill_s=1e-3)
    assert TransferCostModel("pages").should_send_cache(True, 1000, 0.0) and not TransferCostModel(
        "prefill"
    ).should_send_cache(True, 0, 1.0)


# --------------------------------------------------------------------------------------------- two rollouts and a hub


@dataclass
class Loaded:
    version: int = 0

    def newest(self) -> int:
        return self.version


class EngineGenerator(Engine):
    """The engine as a rollout's generator, on weights that nobody changes."""

    can_migrate = True

    def __init__(self, path: Path, **settings: float) -> None:
        super().__init__(path, exact=True, **settings)  # pyright: ignore[reportArgumentType]
        self.weights: Weights = Loaded()
        self.context = self.policy.context
        self.kv_capacity = self.pool.num_pages * self.pool.page_size
        self.kv_token_bytes = self.cache.num_bytes // self.kv_capacity
        self.kv_load = 0

    def prompt_ids(self, row: dict[str, object]) -> list[int]:
        return [5 + len(str(row))] * 20

    def take_weights(self, deadline_s: float) -> Receipt:
        raise NotImplementedError

    def close(self) -> None:
        pass


class ManualRollout:
    """A rollout without its loop: the test turns it."""

    def __init__(self, folder: Path, network: MemoryNetwork, index: int, path: Path, host: str, transfer: str) -> None:
        self.fleet = MemoryFleet.join_network(network, "rollout", index, host=host)
        self.mailbox = self.fleet.open_mailbox(self.fleet.name)
        self.generator = EngineGenerator(path)
        self.leases = HeldLeases(
            self.mailbox, self.fleet.incarnation, SAMPLES, RolloutPacing.of("headrace", None, 8, 3)
        )
        settings, trace = RepackSettings(transfer=transfer), Trace(folder, self.fleet.name, Clock())  # pyright: ignore[reportArgumentType]
        self.migration = Migration(self.fleet, self.mailbox, self.generator, self.leases, settings, 32, trace)
        self.migration.profile = GeneratorProfile(16, 1e-4)
        self.loses: set[type] = set()
        self.heard: list[object] = []

    @property
    def name(self) -> str:
        return self.fleet.name

    def turn(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            while (letter := self.mailbox.receive(0)) is not None:
                self.heard.append(letter.message)
                if type(letter.message) in self.loses:
                    self.loses.remove(type(letter.message))
                elif isinstance(letter.message, LeaseGrant):
                    for lease, fresh in self.leases.take(letter.message, self.generator.weights.version):
                        tokens = self.generator.prompt_ids({"prompt": lease.group})
                        self.generator.add_group(tokens, PARAMS, [held.row_id.number for held in fresh])
                else:
                    self.migration.handle(letter.sender, letter.message)
            self.migration.advance()
            for done in self.generator.step():
                self.leases.held[done.trajectory_id].completion = done
            for held in [h for h in self.leases.held.values() if h.completion and not h.claim_id]:
                del self.leases.held[held.row_id.number]
                assert held.completion is not None
                reward, num_tokens = float(sum(held.completion.token_ids)), len(held.completion.token_ids)
                self.mailbox.send("hub", RowDone(held.row_id, held.attempt, 0, ["relay-0#1"], num_tokens, reward))


class Play:
    """A hub and three rollouts, all turned by the test."""

    def __init__(self, folder: Path, policy: Path, hosts: tuple[str, ...], transfer: str) -> None:
        data = folder / "data.jsonl"
        data.write_text("".join(f'{{"prompt": "p{i}"}}\n' for i in range(9)))
        self.network = MemoryNetwork()
        pool = PromptPool(JsonLines(data), shuffle=False, seed=0)
        queue = QueueSettings(capacity=8)
        admission = Admission(BatchSettings(prompts_per_step=8, samples_per_prompt=SAMPLES), queue, num_steps=10)
        journal, self.path = Journal(folder / "journal.jsonl"), folder / "journal.jsonl"
        self.hub = Hub(
            self.network.mailboxes.open("hub"), HubState(), journal, pool, admission, queue, RepackSettings()
        )
        self.hub.context.commit(ev.Opened(epoch=1, samples_per_prompt=SAMPLES))
        self.actors = [
            ManualRollout(folder, self.network, index, policy, host, transfer) for index, host in enumerate(hosts)
        ]
        self.alive = list(self.actors)
        self.ended: list[MigrateResult] = []
        self.orders = 0

    def turn(self, num_turns: int = 1) -> None:
        for _ in range(num_turns):
            while (letter := self.hub.mailbox.receive(0)) is not None:
                if isinstance(letter.message, MigrateResult):
                    self.ended.append(letter.message)
                assert self.hub.handle(letter)
            for actor in self.alive:
                actor.turn()

    def lease(self, actor: ManualRollout, request: int = 1, num_groups: int = 1) -> None:
        actor.leases._request_id = LeaseRequest(request, 0, num_groups)
        actor.mailbox.send("hub", actor.leases._request_id)
        actor.leases._answered = request - 1
        self.until(lambda: actor.generator.num_running > 0)

    def order(self, source: ManualRollout, target: ManualRollout, version: int = 0) -> None:
        self.orders += 1
        source.migration.handle("hub", MigrateOrder(self.orders, version, target.name))

    def kill(self, actor: ManualRollout) -> None:
        self.alive.remove(actor)
        actor.fleet.crash()
        self.hub.on_process_death(actor.name, "dead")

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, "it never came to that"
            self.turn()

    def close(self) -> None:
        self.hub.context.journal.close()
        for actor in self.actors:
            actor.migration.close()
            actor.migration.trace.close()

    def finish(self) -> dict[RowId, float]:
        """Every row's reward, a fingerprint of its tokens; each row must have ended exactly once."""
        state = self.hub.state
        ready = [RowStatus.READY, RowStatus.FAILED]
        self.until(lambda: all(row.status in ready for group in state.groups.values() for row in group.rows))
        self.until(lambda: not any(actor.migration.is_under_way or actor.leases.held for actor in self.alive))
        ends = [event.row for _, event in read_events(self.path) if isinstance(event, ev.RowReady)]
        assert len(ends) == len(set(ends)) == state.in_flight and state.is_balanced
        assert replay(self.path) == state
        for actor in self.alive:
            actor.generator.check()
            assert actor.generator.idle
        return {g.id.row(s): r.reward for g in state.groups.values() for s, r in enumerate(g.rows)}


Stage = Callable[..., Play]


@pytest.fixture
def stage(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    plays: list[Play] = []
    monkeypatch.setattr(carriage, "LINK_S", 2.0)  # what a thread waits for a destination that refuses

    def make(hosts: tuple[str, ...] = ("here",) * 3, transfer: str = "pages") -> Play:
        folder = tmp_path / str(len(plays))
        folder.mkdir()
        plays.append(Play(folder, llama, hosts, transfer))
        return plays[-1]

    yield make
    for play in plays:
        play.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> dict[RowId, float]:
    """The results of a run in which nothing moves."""
    play = Play(tmp_path_factory.mktemp("undisturbed"), llama, ("here",), "pages")
    try:
        play.lease(play.actors[0])
        return play.finish()
    finally:
        play.close()


@pytest.mark.parametrize("hosts", [("here", "here"), ("here", "there")], ids=["shared memory", "link"])
@pytest.mark.parametrize("transfer", ["pages", "prefill"])
def test_everything_goes_over_and_ends_as_if_it_had_stayed(
    stage: Stage, undisturbed: dict[RowId, float], hosts: tuple[str, ...], transfer: str
):
    play = stage(hosts, transfer)
    source, target = play.actors
    play.lease(source)
    play.turn(10)
    play.order(source, target)
    assert source.generator.idle and len(source.migration.held()) == SAMPLES
    play.until(lambda: target.generator.num_running == SAMPLES)
    assert play.finish() == undisturbed
    (ended,) = play.ended
    assert ended.num_rows == SAMPLES and not ended.refusal and play.hub.state.num_moved == SAMPLES
    assert (ended.num_bytes > 10_000) == (transfer == "pages")
    play.close()
    (span,) = Timeline.read(play.path.parent).spans[source.name]
    assert (span.state, span.facts["to"], span.facts["rows"]) == ("move", target.name, SAMPLES)


@pytest.mark.parametrize("reason", ["version", "full", "unable", "broken"])
def test_refused_trajectories_go_back_and_the_reason_is_counted(
    stage: Stage, undisturbed: dict[RowId, float], reason: str, monkeypatch: pytest.MonkeyPatch
):
    play = stage()
    source, target, _ = play.actors
    play.lease(source)
    match reason:
        case "version":
            target.generator.weights.version = 1
        case "full":
            target.generator.kv_capacity = 60
        case "unable":
            target.migration.profile = None
        case _:
            monkeypatch.setattr(migration, "pack", lambda travellers: [np.zeros(100, np.uint8)])
    play.order(source, target)
    assert play.finish() == undisturbed
    assert play.hub.repacking.refusals == {reason: 1} and play.hub.state.num_moved == 0


def test_orders_that_cannot_be_carried_out_are_declined(stage: Stage):
    play = stage()
    source, target, third = play.actors
    play.order(source, target)
    play.lease(source)
    play.order(source, target, version=3)
    third.fleet.leave()
    play.order(source, third)
    source.migration.profile = None
    play.order(source, target)
    play.turn()
    assert [ended.refusal for ended in play.ended] == ["nothing left", "version", "gone", "unable"]
    play.finish()


@pytest.mark.parametrize("lost", [TransferOffered, TransferRefused, ClaimResult, RowsReassigned])
def test_a_lost_message_costs_time_and_nothing_else(
    stage: Stage, undisturbed: dict[RowId, float], lost: type, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(migration, "REPEAT_S", 0.05)
    monkeypatch.setattr(migration, "PATIENCE_S", 0.2)
    play = stage()
    source, target, _ = play.actors
    play.lease(source)
    if lost is TransferRefused:
        target.generator.weights.version = 1
    for actor in (source, target):
        actor.loses = {lost}
    play.order(source, target)
    assert play.finish() == undisturbed
    assert any(lost not in actor.loses for actor in (source, target)), "nothing was lost"


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("victim", ["source", "destination"])
def test_whoever_dies_in_the_middle_of_a_move_each_row_ends_once(
    stage: Stage, undisturbed: dict[RowId, float], victim: str, turns: int
):
    play = stage()
    source, target, third = play.actors
    play.lease(source)
    play.order(source, target)
    for _ in range(turns):  # one letter or one turn of a rollout after the other
        target.turn()
        if (letter := play.hub.mailbox.receive(0)) is not None:
            assert play.hub.handle(letter)
    dead = source if victim == "source" else target
    play.kill(dead)
    survivor = target if dead is source else source
    play.until(lambda: not survivor.migration.is_under_way)
    if play.hub.state.unassigned:
        play.lease(third)
    assert play.finish() == undisturbed


def test_a_source_that_took_back_too_early_gives_way_to_the_destination(stage: Stage, undisturbed: dict[RowId, float]):
    play = stage()
    source, target, _ = play.actors
    play.lease(source)
    play.order(source, target)
    while not target.generator.num_running:
        target.turn()  # it has the parcel, and its claim is in the hub's inbox
    (number,) = source.migration.pending
    source.migration.handle(target.name, TransferRefused(number, "silent"))
    assert source.generator.num_waiting == SAMPLES
    play.turn(3)
    assert source.generator.idle and not source.leases.held and play.hub.state.num_moved == SAMPLES
    assert play.finish() == undisturbed


def test_moves_at_random_end_every_row_once_with_the_tokens_of_one_that_stayed(stage: Stage):
    outcomes = []
    for has_moves in (False, True):
        play, draw = stage(("here", "here", "there"), "auto"), random.Random(7)
        for request, actor in enumerate(play.actors, 1):
            play.lease(actor, request, num_groups=2)
        while has_moves and any(not actor.generator.idle for actor in play.actors):
            source, target = draw.sample(play.actors, 2)
            play.order(source, target)
            play.turn(draw.randint(1, 6))
        outcomes.append(sorted(play.finish().values()))
        assert (play.hub.state.num_moved > 20) == has_moves
    assert outcomes[0] == outcomes[1]
