"""Whole runs in virtual time under faults: every promise holds after each event, and each run repeats itself bit for bit."""

import fcntl
import gc
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import simulate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulation.cluster import Unit
from simulation.faults import PlannedFault
from simulation.histories import BASE, HISTORIES, History, SeededChooser, history, run
from simulation.processes import Killed, VirtualProcess, VirtualThread
from simulation.simulation import FaultyRun
from simulation.threads import VirtualThreads

from headrace.launch.config.load import read_recipe
from headrace.launch.lab.virtual.world import World
from headrace.relay.hub.context import HubContext
from headrace.relay.hub.shutdown import Shutdown
from headrace.relay.journal import events as ev
from headrace.relay.journal.files import read_blocks, read_events
from headrace.relay.journal.hub_state import HubState
from headrace.relay.journal.snapshots import snapshots_of, write_snapshot
from headrace.relay.journal.state import apply
from headrace.rollout.leases import HeldLeases

T = TypeVar("T")


@pytest.fixture(scope="module", autouse=True)
def few_objects():
    """Each death of a process lets Python look for garbage: not among all that the tests have imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class DrawnChooser:
    """Choices that Hypothesis makes, and makes simpler where a history breaks."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def pick(self, options: Sequence[T]) -> T:
        return self._draw(st.sampled_from(options))

    def number(self, most: int) -> int:
        return self._draw(st.integers(0, most))


@st.composite
def histories(draw: st.DrawFn, steps: int) -> History:
    return history(DrawnChooser(draw), steps, draw(st.integers(0, 6)))


# The same histories each time: other ones are looked for by `tests/simulate.py` and at night, so that no change is held up by chance.
@settings(
    max_examples=8,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(histories(steps=25))
def test_every_promise_holds_whatever_fails(drawn: History):
    run(drawn)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_history_repeats_itself_bit_for_bit(seed: int, monkeypatch: pytest.MonkeyPatch):
    digests: list[str] = []
    finish = FaultyRun.run

    def read_journal(simulation: FaultyRun) -> None:
        finish(simulation)
        journal = b"".join(lines for _, lines in read_blocks(simulation.folder / "journal.jsonl"))
        digests.append(hashlib.sha256(journal.replace(str(simulation.folder).encode(), b"")).hexdigest())

    monkeypatch.setattr(FaultyRun, "run", read_journal)
    for _ in range(2):
        run(history(SeededChooser(seed), steps=20, num_faults=6))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("seed", [0, 2, 5, 9])
def test_a_snapshot_at_any_event_and_the_events_after_it_give_the_state_of_all(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Of the next snapshot too, which is one of a state that came from a snapshot: nothing is lost that shows only later."""
    events: list[ev.Event] = []
    finish = FaultyRun.run

    def read_journal(simulation: FaultyRun) -> None:
        finish(simulation)
        events.extend(event for _, event in read_events(simulation.folder / "journal.jsonl"))

    monkeypatch.setattr(FaultyRun, "run", read_journal)
    run(history(SeededChooser(seed), steps=20, num_faults=6))
    place = (tmp_path / "journal.jsonl").write_bytes(b'{"event":"HubRestarted"}\n')
    state, restored, most_held = HubState(), HubState(), 0
    for number, event in enumerate(events):
        apply(event, state)
        apply(event, restored)
        if number % 7 == seed % 7:
            write_snapshot(tmp_path / "journal.jsonl", place, restored)
            ((_, restored),) = snapshots_of(tmp_path / "journal.jsonl")
        assert restored == state, event
        for name in ("groups", "unassigned", "grants", "dropped"):
            assert [*getattr(restored, name)] == [*getattr(state, name)], f"{name}: the order decides who gets what"
        most_held = max(most_held, len(state.held))
    assert most_held and len(events) > 100


# ------------------------------------------------------------------------------ histories that were broken once


@pytest.mark.parametrize("name", sorted(path.stem for path in HISTORIES.glob("*.json")))
def test_a_history_that_was_broken_once_holds(name: str):
    """Each showed a mistake: one of the product, or one of mutations/simulation.toml."""
    run(msgspec.json.decode((HISTORIES / f"{name}.json").read_bytes(), type=History))


# ------------------------------------------------------------------------------------- broken promises are found


def lose_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit forgets every tenth row."""
    put = Unit.put

    def forgetful(unit: Unit, rows: Any) -> None:
        put(unit, rows)
        if len(unit.rows) % 10 == 0:
            unit.rows.pop(next(iter(rows)))

    monkeypatch.setattr(Unit, "put", forgetful)


def change_the_state_without_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = HubContext.commit

    def careless(context: HubContext, event: ev.Event, **how: Any) -> None:
        commit(context, event, **how)
        if isinstance(event, ev.Handed) and event.step == 3:
            context.state.account.trained += 1

    monkeypatch.setattr(HubContext, "commit", careless)


def hold_what_another_rollout_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout takes the rows of the last grant as its own, even if another rollout got it."""
    take, last = HeldLeases.take, list[Any]()

    def greedy(leases: HeldLeases, grant: Any, version: int) -> Any:
        leases.held |= {held.row_id.number: held for held in last}
        taken = take(leases, grant, version)
        last[:] = [held for _, rows in taken for held in rows] or last
        return taken

    monkeypatch.setattr(HeldLeases, "take", greedy)


def count_a_row_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end the hub overlooks a row, and so logs an error."""
    num_ready = Shutdown._num_ready

    def careless(shutdown: Shutdown, keys: set[str]) -> int:
        return num_ready(shutdown, keys) - 1

    monkeypatch.setattr(Shutdown, "_num_ready", careless)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lose_a_row, "does not have|counted in flight"),
        (change_the_state_without_an_event, "another state"),
        (hold_what_another_rollout_has, "two rollouts hold"),
        (count_a_row_too_few, "errors in the log: .*counted in flight"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_broken_promise_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None], said: str, monkeypatch: pytest.MonkeyPatch
):
    break_it(monkeypatch)
    with pytest.raises((AssertionError, KeyError), match=said):
        run(History({"run.steps": 20, "roles.rollout": 2, "roles.relay": 2}, []))


def test_a_run_that_stands_still_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(HeldLeases, "ask", lambda *_, **__: None)
    with pytest.raises(AssertionError, match="no step is trained for"):
        run(History({"run.steps": 5}, []))


def test_a_broken_history_that_holds_the_second_time_is_printed_as_it_was(monkeypatch: pytest.MonkeyPatch):
    drawn = history(SeededChooser(0), steps=5, num_faults=3)
    monkeypatch.setattr(simulate, "problem", lambda _: "")
    what, least = simulate._reduced(drawn, "AssertionError: a rare one")
    assert what.startswith("AssertionError: a rare one") and "held the second time" in what and least is drawn


def test_the_files_of_a_dead_process_are_closed_and_their_owners_may_close_them_again(tmp_path: Path):
    settings = BASE | {"run.dir": tmp_path, "data.path": tmp_path / "prompts.jsonl"}
    simulation = FaultyRun(tmp_path, read_recipe(None, [f"{key}={value}" for key, value in settings.items()]))
    lock = (tmp_path / "journal.jsonl").open("a")
    fcntl.flock(lock, fcntl.LOCK_EX)
    simulation._close_files("journal.jsonl")
    with (tmp_path / "journal.jsonl").open("a") as next_lock:
        fcntl.flock(next_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.close()
        os.fstat(next_lock.fileno())


# ------------------------------------------------------------------------------------------------- threads, one at a time


def test_threads_take_turns_in_the_order_of_their_waits():
    world, said = World(), list[str]()
    threads = VirtualThreads(world)

    def count(name: str, seconds: float) -> None:
        for number in range(3):
            threads.sleep(seconds)
            said.append(f"{name}{number} {world.now:g}")

    for name, seconds in (("a", 1.0), ("b", 1.5)):
        VirtualThread(world, VirtualProcess(name, 1), lambda n=name, s=seconds: count(n, s), "main").start()
    world.run_until(lambda: not world.threads)
    assert said == ["a0 1", "b0 1.5", "a1 2", "a2 3", "b1 3", "b2 4.5"]


def test_a_killed_process_ends_where_it_waits_and_a_frozen_one_waits_longer():
    world, said = World(), list[str]()
    threads = VirtualThreads(world)
    mortal, cold = VirtualProcess("mortal", 1), VirtualProcess("cold", 1)

    def live(name: str) -> None:
        try:
            threads.sleep(2.0)
            said.append(f"{name} {world.now:g}")
        except Killed:
            said.append(f"{name} was killed at {world.now:g}")
            raise

    for process in (mortal, cold):
        VirtualThread(world, process, lambda p=process: live(p.name), "main").start()
    world.at(1.0, mortal.kill)
    world.at(1.0, lambda: setattr(cold, "frozen_until", 5.0))
    world.run_until(lambda: not world.threads)
    assert said == ["mortal was killed at 1", "cold 5"]


SLOW = {"run.steps": 3, "comm.deadline_s": 3, "lab.median_tokens": 700, "sampling.max_new_tokens": 800}
"""A group takes about 9 s."""


@pytest.mark.parametrize("schedule", ["headrace", "sync"])
def test_a_trainer_waits_for_groups_that_take_longer_than_its_deadline(schedule: str):
    assert not run(History(SLOW | {"run.schedule": schedule}, [])).applied["actor-0: WaitTimeout"]


def test_a_trainer_whose_hub_is_frozen_waits_until_its_deadline():
    frozen_hub = PlannedFault(at=3, kind="freeze", role="hub", seconds=8)
    assert run(History(SLOW, [frozen_hub])).applied["actor-0: WaitTimeout"]


def test_the_error_of_a_thread_ends_the_world():
    world = World()

    def fail() -> None:
        VirtualThreads(world).sleep(1.0)
        raise ValueError("broken")

    VirtualThread(world, VirtualProcess("a", 1), fail, "main").start()
    with pytest.raises(ValueError, match="broken"):
        world.run_until(lambda: False)


def test_a_row_that_was_spoilt_is_read_from_its_other_unit():
    """Every row of one unit is spoilt; each step is trained all the same."""
    plan = [PlannedFault(at=at / 2, kind="corrupt bytes", role="relay", number=0, count=at % 9) for at in range(40)]
    simulation = run(History({"run.steps": 25, "roles.relay": 2}, plan))
    assert simulation.applied["corrupt bytes: relay"] > 20
