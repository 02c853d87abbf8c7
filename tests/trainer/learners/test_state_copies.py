"""Copies of the training state in memory: a trainer that is started again continues from them bit for bit."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.actors import actor_of, batch_of, on_two_ranks, recipe_of, train
from support.closing import at_end
from support.in_memory import MemoryFleet, MemoryNetwork
from support.policies import tiny_policy
from support.rank_threads import RankThreads

from headrace.comm.environment import SEGMENT_FD
from headrace.comm.host_memory import HeldMemory
from headrace.comm.shared_memory import Lock, Segment
from headrace.launch.config.run_folder import start_in
from headrace.launch.placement import Placement
from headrace.launch.processes.copies_writer import CopiesWriter
from headrace.relay.weights import copies_on_disk
from headrace.relay.weights.copies_on_disk import CopiesOnDisk, CopyHead
from headrace.relay.weights.slots import StoredVersion
from headrace.trainer.actor_group import ActorGroup
from headrace.trainer.checkpoint import TrainingState
from headrace.trainer.learners import copy_thread, state_copies
from headrace.trainer.learners.actor import Actor
from headrace.trainer.learners.copy_thread import COST_SHARE, CopyThread, Pace
from headrace.trainer.learners.optimizer import Update
from headrace.trainer.learners.state_copies import StateCopies
from headrace.trainer.learners.state_layout import StateLayout
from headrace.trainer.step_metrics import StepMetrics

CRITIC = {"algorithm__advantage": "gae", "critic__warmup_steps": 3}
SETTINGS = [{}, {"lora__rank": 2}, CRITIC, {"batch__updates_per_version": 2, "batch__prompts_per_step": 4}]


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def segment() -> Segment:
    return new_segment()


def new_segment() -> Segment:
    """The memory of a supervisor."""
    segment = Segment.create_anonymous("copies")
    at_end(segment.close)
    return segment


class EachStep(Pace):
    """A copy after each step, whatever it costs."""

    @property
    def steps(self) -> int:
        return 1


def with_copies(actor: Actor, segment: Segment) -> StateCopies:
    """The copies of an actor, as if of a process of its own, with a copy after each step."""
    actor.copies = copies = StateCopies(Segment.open(segment.path), actor.state, actor.group)
    at_end(copies.close)
    copies.pace = EachStep(1)
    return copies


def steps(actor: Actor, count: int) -> list[dict[str, float]]:
    """The metrics of steps with copies between them, where they are due."""
    found: list[dict[str, float]] = []
    for _ in range(count):
        groups = [batch_of(actor.version, first=first) for first in range(actor.recipe.batch.prompts_per_step)]
        metrics = train(actor, groups)
        found.append({name: value for name, value in metrics.items() if "timing" not in name})
        if actor.copies is not None:
            actor.copies.after_step()
    return found


def wait(actor: Actor) -> None:
    assert actor.copies is not None
    actor.copies.finish()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_trainer_continues_from_the_newest_copy_bit_for_bit(
    policy_dir: Path, segment: Segment, settings: dict[str, object]
):
    recipe = recipe_of(policy_dir, **settings)
    undisturbed, dying, successor = (actor_of(recipe) for _ in range(3))
    steps(undisturbed, 2)
    expected = steps(undisturbed, 3)
    with_copies(dying, segment)
    steps(dying, 2)
    wait(dying)
    random_numbers = torch.get_rng_state()
    torch.manual_seed(99)
    copies = with_copies(successor, segment)
    assert copies.newest(9) == 2
    copies.restore(2)
    assert successor.version == 2 and torch.equal(torch.get_rng_state(), random_numbers)
    assert steps(successor, 3) == expected
    for name, weight in undisturbed.policy.weights().items():
        assert torch.equal(weight, successor.policy.weights()[name]), name


def test_an_update_waits_for_the_copy_of_the_state_before_it(
    policy_dir: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch
):
    actor, successor = actor_of(recipe_of(policy_dir)), actor_of(recipe_of(policy_dir))
    may_copy = threading.Event()
    monkeypatch.setattr(copy_thread, "failpoint", lambda *_, **__: may_copy.wait(60))
    at_end(may_copy.set)
    copies = with_copies(actor, segment)
    steps(actor, 1)
    before_update, update = copies.before_update, actor.updater.update

    def begin_to_wait() -> None:
        may_copy.set()
        before_update()

    def update_after_the_copy(*args: Any, **more: Any) -> Update:
        assert may_copy.is_set(), "the copy has not begun"
        return update(*args, **more)

    monkeypatch.setattr(copies, "before_update", begin_to_wait)
    monkeypatch.setattr(actor.updater, "update", update_after_the_copy)
    before = [parameter.detach().clone() for parameter in actor.policy.parameters()]
    train(actor, [batch_of(1)])
    copies = with_copies(successor, segment)
    assert copies.newest(9) == 1
    copies.restore(1)
    assert all(torch.equal(a, b) for a, b in zip(before, successor.policy.parameters(), strict=True))


@pytest.mark.parametrize("error", [OSError, RuntimeError, KeyError])
def test_a_process_that_dies_while_it_copies_leaves_the_copy_before(
    policy_dir: Path,
    segment: Segment,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: type[Exception],
):
    actor = actor_of(recipe_of(policy_dir))
    with_copies(actor, segment)
    steps(actor, 2)
    wait(actor)

    def die(*_: object, **__: object) -> None:
        raise error("no more pages")

    monkeypatch.setattr(copy_thread, "failpoint", die)
    steps(actor, 1)
    torn = actor.copies
    assert torn is not None
    torn.close()
    told = capsys.readouterr().out
    assert f"no more copies of the training state are made in memory: {error.__name__}: " in told
    assert "no more pages" in told
    monkeypatch.undo()
    successor = actor_of(recipe_of(policy_dir))
    copies = with_copies(successor, segment)
    assert copies.newest(9) == 2
    copies.restore(2)
    steps(successor, 1)
    wait(successor)
    assert with_copies(actor_of(recipe_of(policy_dir)), segment).newest(9) == 3, "the torn copy's place is used again"


def test_a_damaged_copy_is_not_used_and_neither_is_one_that_is_newer_than_the_hub_knows(
    policy_dir: Path, segment: Segment, capsys: pytest.CaptureFixture[str]
):
    actor, successor = actor_of(recipe_of(policy_dir)), actor_of(recipe_of(policy_dir))
    with_copies(actor, segment)
    steps(actor, 2)
    wait(actor)
    copies = with_copies(successor, segment)
    assert [copies.newest(most) for most in (0, 1, 2)] == [-1, 1, 2] and not capsys.readouterr().out
    segment.slot(1)[-100] ^= 1  # the second copy
    assert copies.newest(2) == 1
    assert "the copy of the training state after step 2 is not used: its digest is another" in capsys.readouterr().out


def test_a_trainer_that_continues_from_a_copy_or_a_checkpoint_gives_up_all_other_copies(
    policy_dir: Path, segment: Segment
):
    recipe = recipe_of(policy_dir)
    actor, successor = actor_of(recipe), actor_of(recipe)
    with_copies(actor, segment)
    steps(actor, 2)
    wait(actor)
    copies = with_copies(successor, segment)
    assert copies.newest(1) == 1, "as far as the hub knows"
    copies.restore(1)
    assert copies.newest(9) == 1, "the step after it is trained again, and may differ"
    steps(successor, 1)
    wait(successor)
    last = actor_of(recipe)
    copies = with_copies(last, segment)
    assert copies.newest(9) == 2
    copies.restore(2)
    for ours, theirs in zip(last.policy.parameters(), successor.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert copies.newest(1) == -1, "the copies of another history are no more"
    copies.forget()
    assert copies.newest(9) == -1


def test_the_copies_of_another_policy_are_not_used(
    policy_dir: Path, tmp_path: Path, segment: Segment, capsys: pytest.CaptureFixture[str]
):
    actor = actor_of(recipe_of(policy_dir))
    with_copies(actor, segment)
    steps(actor, 1)
    wait(actor)
    other = actor_of(recipe_of(tiny_policy(tmp_path, hidden_size=32)))
    assert with_copies(other, segment).newest(9) == -1
    assert "the copies of the training state in memory are not used: they have other" in capsys.readouterr().out


def left_by(actor: Actor, segment: Segment, run_dir: Path) -> CopiesOnDisk:
    """What the supervisor of a failed run leaves of the actor's copies after three steps: those of steps 2 and 3."""
    (run_dir / "config.yaml").touch()
    with_copies(actor, segment)
    steps(actor, 3)
    wait(actor)
    start = start_in(run_dir)
    CopiesWriter(run_dir, Placement("actor", 0, 0, 0), 1, start).write({SEGMENT_FD: segment._fd}, has_ended=False)
    saved = CopiesOnDisk(run_dir)
    assert saved.steps() == [2, 3]
    return saved


def resumed(actor: Actor, saved: CopiesOnDisk) -> StateCopies:
    """The copies of an actor with the memory of another supervisor."""
    actor.copies = copies = StateCopies(new_segment(), actor.state, actor.group, on_disk=saved)
    at_end(copies.close)
    copies.pace = EachStep(1)
    return copies


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_resumed_trainer_continues_from_what_a_failed_run_has_left_bit_for_bit(
    policy_dir: Path, tmp_path: Path, segment: Segment, settings: dict[str, object]
):
    recipe = recipe_of(policy_dir, **settings)
    undisturbed, dying, successor = (actor_of(recipe) for _ in range(3))
    steps(undisturbed, 2)
    expected = steps(undisturbed, 2)
    saved = left_by(dying, segment, tmp_path)
    copies = resumed(successor, saved)
    assert copies.newest(2) == 2, "the journal does not know step 3"
    assert copies.source == "the copy in the run folder"
    copies.restore(2)
    assert successor.version == 2
    assert steps(successor, 2) == expected
    for name, weight in undisturbed.policy.weights().items():
        assert torch.equal(weight, successor.policy.weights()[name]), name
    wait(successor)
    assert copies.newest(9) == 4 and copies.source == "the copy in memory"
    assert saved.steps() == [2, 3], "until a checkpoint is newer"


def test_left_copies_that_are_older_than_the_checkpoint_are_not_read(
    policy_dir: Path, tmp_path: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch
):
    actor = actor_of(recipe_of(policy_dir))
    saved = left_by(actor, segment, tmp_path)
    read: list[int] = []
    read_file = saved.read
    monkeypatch.setattr(saved, "read", lambda step, rank, into: read.append(step) or read_file(step, rank, into))
    assert resumed(actor, saved).newest(9, checkpoint=2) == 3
    assert read == [3]


def test_left_copies_that_are_damaged_or_of_another_policy_are_removed_and_the_console_says_so(
    policy_dir: Path, tmp_path: Path, segment: Segment, capsys: pytest.CaptureFixture[str]
):
    actor = actor_of(recipe_of(policy_dir))
    saved = left_by(actor, segment, tmp_path)
    damaged = bytearray(saved.file(3, 0).read_bytes())
    damaged[-100] ^= 1
    saved.file(3, 0).write_bytes(damaged)
    copies = resumed(actor, saved)
    assert copies.newest(9) == 2
    assert "the copy of the training state after step 3 is not used: its digest is another" in capsys.readouterr().out
    assert copies.newest(9, checkpoint=2) == -1 and not saved.root.exists()
    write_left = left_by(actor_of(recipe_of(policy_dir)), new_segment(), tmp_path)
    other = actor_of(recipe_of(tiny_policy(tmp_path, hidden_size=32)))
    assert resumed(other, write_left).newest(9) == -1
    assert f"{saved.file(3, 0)} is not used: it has other tensors" in capsys.readouterr().out
    assert not saved.root.exists()


def write_files(run_dir: Path, copies: list[StateCopies], step: int, starts: tuple[str, str]) -> CopiesOnDisk:
    """Files of two ranks, as of these starts of a run."""
    on_disk = CopiesOnDisk(run_dir)
    for rank, (each, start) in enumerate(zip(copies, starts, strict=True)):
        layout = StateLayout(each._state.state_dict())
        content = np.empty(layout.num_bytes, np.uint8)
        digest = layout.write(content, lambda: None)
        on_disk.write(rank, CopyHead(step, digest, layout.fingerprint, layout.num_bytes, 2, start), content)
        each._on_disk = on_disk
    return on_disk


def test_ranks_do_not_continue_from_copies_of_two_starts(tmp_path: Path):
    ranks = RankThreads(2)
    copies = [copies_of_a_layer(ranks.group(number)) for number in range(2)]
    write_files(tmp_path, copies, 4, ("2", "2"))
    write_files(tmp_path, copies, 7, ("1", "2"))
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda each: each.newest(9), copies)] == [4, 4], "steps 5 to 7 were trained again"


def test_a_rank_that_reads_a_left_copy_for_long_takes_part_in_collectives_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ranks, noted = RankThreads(2), list[str]()
    groups = [ranks.group(number) for number in range(2)]
    copies = [copies_of_a_layer(group) for group in groups]
    on_disk = write_files(tmp_path, copies, 7, ("1", "1"))
    monkeypatch.setattr(copies_on_disk, "_PIECE_BYTES", 64)
    read, reduce = on_disk.read, groups[1].all_reduce_max

    def read_slowly(step: int, rank: int, content: np.ndarray) -> Iterator[int]:
        for size in read(step, rank, content):
            noted.extend(["piece"] * rank)
            yield size

    def all_reduce_max(values: list[float]) -> list[float]:
        noted.append("collective")
        return reduce(values)

    monkeypatch.setattr(on_disk, "read", read_slowly)
    groups[1].all_reduce_max = all_reduce_max
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda each: each.newest(9), copies)] == [7, 7]
    assert noted.count("piece") > 3 and ("piece", "piece") not in pairwise(noted)


def leave(monkeypatch: pytest.MonkeyPatch, num_bytes: int, growth: int = 0) -> None:
    """Have so many bytes free on the host, and the process so many below its peak."""
    monkeypatch.setattr(state_copies, "memory_bytes", lambda: 0)
    monkeypatch.setattr(state_copies, "free_bytes", lambda: num_bytes)
    monkeypatch.setattr(state_copies, "held_by", lambda _: HeldMemory(1000, 10, 1000 + growth))


def test_without_room_on_the_host_there_are_no_copies_and_the_console_says_so(
    policy_dir: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    actor = actor_of(recipe_of(policy_dir))
    copies = with_copies(actor, segment)
    needed = 2 * StateLayout(actor.state.state_dict()).num_bytes - segment.held_bytes + 10_000
    leave(monkeypatch, needed - 1, growth=10_000)
    steps(actor, 2)
    assert segment.num_slots == 0 and copies.hold({}) is None
    assert capsys.readouterr().out.count("GB of memory for copies of the training state") == 1
    leave(monkeypatch, needed, growth=10_000)
    with_copies(actor, segment)
    steps(actor, 1)
    wait(actor)
    assert segment.num_slots == 2


def test_a_trainer_that_is_started_again_where_the_room_is_gone_gives_the_copies_back(
    policy_dir: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch
):
    actor, successor = actor_of(recipe_of(policy_dir)), actor_of(recipe_of(policy_dir))
    with_copies(actor, segment)
    steps(actor, 1)
    wait(actor)
    copies = with_copies(successor, segment)
    copies.restore(copies.newest(9))
    leave(monkeypatch, 10_000, growth=10_000)
    steps(successor, 1)
    wait(successor)
    assert with_copies(actor, segment).newest(9) == 2, "the copies have their memory already"
    leave(monkeypatch, 10_000, growth=1 << 30)
    steps(actor, 1)
    assert segment.held_bytes < 20_000 and with_copies(successor, segment).newest(9) == -1


def test_a_trainer_whose_predecessor_was_killed_for_memory_gives_the_copies_back_before_its_first_step(
    policy_dir: Path,
    tmp_path: Path,
    segment: Segment,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    actor, successor = actor_of(recipe_of(policy_dir)), actor_of(recipe_of(policy_dir))
    with_copies(actor, segment)
    steps(actor, 1)
    wait(actor)
    monkeypatch.setattr(Segment, "inherited", lambda: Segment.open(segment.path))
    monkeypatch.setenv("HEADRACE_SEGMENT_FD", "1")
    monkeypatch.setenv("HEADRACE_LACKS_MEMORY", "1")
    fleet = MemoryFleet.join_network(MemoryNetwork(), "actor", 0)
    copies = StateCopies.of_supervisor(fleet, successor.state, successor.group, tmp_path)
    assert copies is not None and "the kernel has killed the process before for memory" in capsys.readouterr().out
    at_end(copies.close)
    copies.restore(copies.newest(9))
    assert successor.version == 1 and segment.held_bytes < 20_000
    successor.copies = copies
    steps(successor, 2)
    assert segment.held_bytes < 20_000 and copies.hold({}) is None


def test_memory_that_a_checkpoint_is_written_from_is_given_back_once_it_is_written(policy_dir: Path, segment: Segment):
    actor = actor_of(recipe_of(policy_dir))
    copies = with_copies(actor, segment)
    steps(actor, 1)
    held = copies.hold({})
    assert held is not None
    copies._fail("the test")
    steps(actor, 1)
    assert any(bool(weight.any()) for weight in held[0]["model"].values())
    copies.release(held[1])
    steps(actor, 1)
    assert segment.held_bytes < 20_000


def test_an_update_does_not_wait_for_memory_that_is_being_prepared(
    policy_dir: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch
):
    actor = actor_of(recipe_of(policy_dir))
    copies = with_copies(actor, segment)
    may_prepare, prepare = threading.Event(), copies._slots.prepare

    def slow(num_bytes: int, fingerprint: int) -> None:
        may_prepare.wait(60)
        prepare(num_bytes, fingerprint)

    monkeypatch.setattr(copies._slots, "prepare", slow)
    monkeypatch.setattr(state_copies, "_PREPARATION_S", 0.01)
    at_end(may_prepare.set)
    steps(actor, 3)
    assert segment.num_slots == 0 and copies.hold({}) is None
    may_prepare.set()
    assert copies._copy is not None and copies._copy.has_ended.wait(60)
    assert segment.num_slots == 2 and copies.newest(9) == -1, "the state has changed meanwhile"
    assert [copies._slots.generation(slot) for slot in (0, 1)] == [0, 0], "no copy was begun"
    monkeypatch.setattr(state_copies, "_PREPARATION_S", 60)
    steps(actor, 1)
    wait(actor)
    assert copies.newest(9) == 4


def test_the_time_to_prepare_the_memory_does_not_make_copies_rarer(
    policy_dir: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch
):
    actor = actor_of(recipe_of(policy_dir))
    copies = with_copies(actor, segment)
    prepare, costs = copies._slots.prepare, list[float]()

    def slow(num_bytes: int, fingerprint: int) -> None:
        while copies._is_awaited:  # until the training waits
            threading.Event().wait(0.001)
        threading.Event().wait(0.3)
        prepare(num_bytes, fingerprint)

    monkeypatch.setattr(copies._slots, "prepare", slow)
    monkeypatch.setattr(state_copies, "_PREPARATION_S", 60)
    monkeypatch.setattr(copies.pace, "add_copy", lambda cpu_s, stall_s: costs.append(stall_s))
    steps(actor, 1)
    wait(actor)
    assert costs and costs[0] < copies.figures()["checkpoint/memory_stall_s"] - 0.2


def test_a_copy_that_takes_too_long_is_given_up_and_training_continues(
    policy_dir: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    actor = actor_of(recipe_of(policy_dir))
    copies = with_copies(actor, segment)
    steps(actor, 1)
    wait(actor)
    copies._deadline_s = 0.01
    may_copy = threading.Event()
    monkeypatch.setattr(copy_thread, "failpoint", lambda *_, **__: may_copy.wait(60))
    monkeypatch.setattr(state_copies, "_PREPARATION_S", 60)
    at_end(may_copy.set)
    steps(actor, 1)
    assert copies._copy is not None and copies._copy.is_prepared.wait(60)
    steps(actor, 1)
    assert "no more copies of the training state are made in memory: one has taken" in capsys.readouterr().out
    assert segment.held_bytes > 20_000, "a thread may still write there"
    may_copy.set()
    assert copies._copy is not None and copies._copy.has_ended.wait(60)
    assert copies.newest(9) == 1, "a copy that was given up does not count"
    steps(actor, 1)
    assert segment.held_bytes < 20_000


def test_training_continues_without_copies_where_the_system_has_no_thread_for_one(
    policy_dir: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    actor = actor_of(recipe_of(policy_dir))
    copies = with_copies(actor, segment)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    steps(actor, 2)
    assert "can't start new thread" in capsys.readouterr().out
    assert copies.newest(9) == -1


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_copies_that_another_process_reads_are_not_overwritten_and_the_console_says_so(
    policy_dir: Path, segment: Segment, capsys: pytest.CaptureFixture[str]
):
    actor = actor_of(recipe_of(policy_dir))
    copies = with_copies(actor, segment)
    steps(actor, 2)
    wait(actor)
    reader = Segment.open(segment.path)
    assert reader.try_lock(0, Lock.SHARED)
    steps(actor, 1)
    wait(actor)
    assert "the training state after step 3 is not copied in memory: both" in capsys.readouterr().out
    reader.close()
    steps(actor, 1)
    wait(actor)
    assert (copies.newest(9), copies.newest(3)) == (4, 2)


def test_a_checkpoint_is_written_from_a_copy_that_stays_until_then(policy_dir: Path, segment: Segment):
    actor = actor_of(recipe_of(policy_dir))
    copies = with_copies(actor, segment)
    steps(actor, 2)
    by_address: dict[int, torch.Tensor] = {}
    held = copies.hold(by_address)
    assert held is not None
    state, stored = held
    before = actor.state.state_dict()["model"]
    assert all(torch.equal(state["model"][name], weight) for name, weight in before.items())
    assert all(torch.equal(by_address[weight.data_ptr()], weight) for weight in before.values())
    kept = {name: weight.clone() for name, weight in state["model"].items()}
    steps(actor, 3)
    wait(actor)
    assert all(torch.equal(state["model"][name], weight) for name, weight in kept.items())
    assert (copies.newest(9), copies.newest(2)) == (3, 2), (
        "the newest copy is not given up for one that is not whole yet"
    )
    copies.release(stored)
    steps(actor, 1)
    wait(actor)
    assert (copies.newest(9), copies.newest(2)) == (6, -1)


def test_a_state_within_a_step_is_no_copy_of_the_step_before(policy_dir: Path, segment: Segment):
    actor = actor_of(recipe_of(policy_dir, batch__updates_per_version=2, batch__prompts_per_step=2))
    copies = with_copies(actor, segment)
    steps(actor, 1)
    wait(actor)
    (made,) = copies._slots.complete_versions()
    actor.accumulate(batch_of(1), StepMetrics())
    assert len(actor.updates) == 1
    actor.discard()
    assert copies.hold({}) is None and copies._slots.complete_versions() == [made]


def test_the_moments_of_an_optimizer_that_has_made_no_step_count_no_step(policy_dir: Path):
    watched, alone = (actor_of(recipe_of(policy_dir, **CRITIC)) for _ in range(2))
    watched.state.state_dict()
    for _ in range(4):  # the policy is updated in the fourth
        watched.state.state_dict()
        assert steps(watched, 1) == steps(alone, 1)


@pytest.mark.parametrize(
    ("cpu_s", "stall_s", "step_s"), [(0.25, 0.01, 8.7), (0.01, 0.25, 8.7), (1e-6, 0, 1), (5, 5, 10)]
)
def test_copies_are_as_frequent_as_a_hundredth_of_the_time_allows(cpu_s: float, stall_s: float, step_s: float):
    pace = Pace(num_cores=2)
    assert pace.steps == 1, "before anything was measured"
    for wrong in (0.5, 1, 2):
        pace.add_copy(wrong * cpu_s, wrong * stall_s)
        pace.add_step(wrong * step_s)
    every, cost = pace.steps, max(cpu_s / 2, stall_s)
    assert cost <= COST_SHARE * every * step_s and (every == 1 or cost > COST_SHARE * (every - 1) * step_s)


def test_copies_are_no_rarer_than_checkpoints():
    pace = Pace(num_cores=2)
    pace.add_copy(90, 90)
    pace.add_step(60)
    assert pace.steps == 30
    pace.add_step(10_000)
    pace.add_step(10_000)
    assert pace.steps == 1


@pytest.mark.parametrize(
    ("held", "newest"),
    [(([3, 6], [3, 6]), 6), (([3, 6], [3]), 3), (([6], [3]), -1), (([3, 6], []), -1), (([], []), -1)],
)
def test_ranks_continue_from_the_newest_step_that_all_of_them_hold(held: tuple[list[int], list[int]], newest: int):
    ranks = RankThreads(2)
    copies = [copies_of_a_layer(ranks.group(number)) for number in range(2)]
    for mine, steps_held in zip(copies, held, strict=True):
        for step in steps_held:
            write_copy(mine, step)
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda each: each.newest(9), copies)] == [newest] * 2


def test_all_ranks_do_without_copies_once_one_has_failed():
    ranks = RankThreads(2)
    copies = [copies_of_a_layer(ranks.group(number)) for number in range(2)]

    def step(each: StateCopies) -> None:
        each._state.step += 1
        each.after_step()
        each.finish()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(step, copies))
        assert all(each._slots.segment.held_bytes > 8192 for each in copies)
        copies[1]._fail("the test")
        list(pool.map(step, copies))
    assert all(each._slots.segment.held_bytes <= 8192 for each in copies)
    assert [each.hold({}) for each in copies] == [None, None]


class NotedExchanges:
    """The steps of the copies that a rank sends to another host, -1 without one, and -2 once the memory is freed."""

    held_bytes = num_bytes = 0
    is_at_work = False

    def __init__(self) -> None:
        self.is_off = False
        self.is_sending = False
        self.sent: frozenset[int] = frozenset()
        self.steps: list[int] = []

    @property
    def is_ready(self) -> bool:
        return not self.is_off and not self.is_sending

    def begin(self, mine: StoredVersion | None, content: np.ndarray) -> None:
        assert mine is None or mine.digest
        self.steps.append(-1 if mine is None else mine.version)

    def take_seconds(self) -> float:
        return 0.0

    def finish(self) -> None:
        self.is_sending = False

    def free(self) -> None:
        self.steps.append(-2)

    def keep(self, step: int | None) -> None:
        pass

    def meet(self, group: ActorGroup, layout: StateLayout) -> None:
        group.all_reduce_max([0.0] * 4)

    prepare = close = finish


def step_without_copy(copies: StateCopies) -> None:
    copies.before_update()
    copies._state.step += 1


def copied_step(copies: StateCopies) -> None:
    step_without_copy(copies)
    copies.after_step()


def held_step(copies: StateCopies) -> int:
    held = copies.hold({})
    return -1 if held is None else held[1].version


def test_copies_are_exchanged_by_all_ranks_or_none():
    copies, noted = exchanging_ranks()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(copied_step, copies))
        list(pool.map(copied_step, copies))
        assert [*pool.map(held_step, copies)] == [2, 2]
        assert [each.steps for each in noted] == [[2], [2]], "some rank may prepare its memory for the first one"
        list(pool.map(step_without_copy, copies))
        assert [*pool.map(held_step, copies)] == [3, 3], "a checkpoint's"
        assert [each.steps for each in noted] == [[2, 3], [2, 3]]
        list(pool.map(step_without_copy, copies))
        copies[1]._fail("the test")
        assert [*pool.map(held_step, copies)] == [-1, -1]
        list(pool.map(copied_step, copies))
    assert [each.steps for each in noted] == [[2, 3, -2], [2, 3, -2]], "freed with the own ones"


def test_while_one_rank_sends_its_copy_no_rank_makes_another_and_a_checkpoint_waits():
    copies, noted = exchanging_ranks()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(copied_step, copies))
        list(pool.map(copied_step, copies))
        noted[1].is_sending = True
        list(pool.map(copied_step, copies))
        list(pool.map(StateCopies.finish, copies))
        assert [each._slots.newest() for each in copies] == [2, 2]
        assert [*pool.map(held_step, copies)] == [3, 3] and not noted[1].is_sending
        for each in copies:
            each._held.clear()
        list(pool.map(copied_step, copies))
        list(pool.map(StateCopies.finish, copies))
    assert [each.steps for each in noted] == [[2, 3, 4], [2, 3, 4]]
    assert [each._slots.newest() for each in copies] == [4, 4]


def test_ranks_whose_predecessor_was_killed_for_memory_and_others_begin_with_a_checkpoint_in_step():
    copies, noted = exchanging_ranks()
    copies[1]._fail("the test")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(StateCopies.forget, copies))
        assert [each._second is None for each in copies] == [False, True]
        list(pool.map(step_without_copy, copies))
        assert [*pool.map(held_step, copies)] == [-1, -1]
        list(pool.map(StateCopies.after_step, copies))
    assert [each.steps for each in noted] == [[-2], [-2]]


def test_the_last_checkpoint_neither_waits_for_an_exchange_nor_begins_one():
    copies, noted = exchanging_ranks()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            list(pool.map(copied_step, copies))
        list(pool.map(StateCopies.finish, copies))
        noted[1].is_sending = True
        list(pool.map(step_without_copy, copies))
        list(pool.map(StateCopies.end, copies))
        assert [*pool.map(held_step, copies)] == [3, 3]
    assert noted[1].is_sending and [each.steps for each in noted] == [[2], [2]]


def test_the_copy_that_is_sent_is_not_overwritten():
    copies = copies_of_a_layer(RankThreads(1).group(0))
    write_copy(copies, 1)
    write_copy(copies, 2)
    older = copies._slots.complete_versions()[0]
    noted = NotedExchanges()
    noted.sent = frozenset([older.slot])
    copies._second = cast(Any, noted)
    copies._state.step = 3
    assert copies.hold({}) is None and older in copies._slots.complete_versions()
    noted.sent = frozenset()
    assert copies.hold({}) is not None and older not in copies._slots.complete_versions()


def test_a_failed_exchange_of_one_rank_ends_those_of_all():
    copies, noted = exchanging_ranks()
    with ThreadPoolExecutor(2) as pool:
        for number in range(4):
            list(pool.map(copied_step, copies))
            noted[1].is_off = number == 1
        list(pool.map(StateCopies.finish, copies))
    assert [each.steps for each in noted] == [[2, -2], [2, -2]] and all(each._second is None for each in copies)
    assert [each._slots.newest() for each in copies] == [4, 4]


def exchanging_ranks() -> tuple[list[StateCopies], list[NotedExchanges]]:
    """Two ranks on two hosts, which copy after each step, and what they send."""
    ranks = RankThreads(2)
    copies = [copies_of_a_layer(ranks.group(number)) for number in range(2)]
    noted = [NotedExchanges() for _ in copies]
    for each, exchanges in zip(copies, noted, strict=True):
        each._second = cast(Any, exchanges)
        each.pace = EachStep(1)
    return copies, noted


def copies_of_a_layer(group: ActorGroup) -> StateCopies:
    layer = torch.nn.Linear(3, 3)
    state = TrainingState(layer, torch.optim.AdamW(layer.parameters()))
    copies = StateCopies(Segment.create_anonymous("copies"), state, group)
    at_end(copies.close)
    return copies


def write_copy(copies: StateCopies, step: int) -> None:
    """A copy of the present state, as if after this step."""
    CopyThread(copies._slots, StateLayout(copies._state.state_dict()), step)._run()


TWO_RANKS = """
from headrace.comm.host_memory import HeldMemory
from headrace.comm.shared_memory import Lock, Segment
from headrace.trainer.learners.state_copies import StateCopies
segment = Segment.create_anonymous()
undisturbed, dying, successor = (actor_of(recipe_of(args[0], **eval(args[1])), group) for _ in range(3))
train(undisturbed, [batch_of(0, group=group)])
train(dying, [batch_of(0, group=group)])
dying.copies = StateCopies(segment, dying.state, group, num_here=2)
dying.copies.after_step()
train(dying, [batch_of(1, group=group)])
copies = StateCopies(segment, successor.state, group)
assert copies.newest(9) == 1
copies.restore(1)
for step in (1, 2):
    norms = [train(each, [batch_of(step, group=group)])["actor/grad_norm"] for each in (undisturbed, successor)]
    assert norms[0] == norms[1], norms
for ours, theirs in zip(successor.policy.parameters(), undisturbed.policy.parameters(), strict=True):
    assert torch.equal(ours.to_local(), theirs.to_local())
"""


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"optimizer__name": "adamw8bit"}, marks=pytest.mark.slow)], ids=str
)
def test_each_rank_has_the_copy_of_its_own_shard(tmp_path: Path, settings: dict[str, object]):
    if settings:
        pytest.importorskip("torchao")
    policy = tiny_policy(tmp_path, "llama", hidden_size=128, intermediate_size=256)
    on_two_ranks(tmp_path, TWO_RANKS, policy, repr(settings))
