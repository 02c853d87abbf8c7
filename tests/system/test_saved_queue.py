"""A run that is interrupted or killed is resumed with its queue: no finished row and few tokens are generated again."""

import json
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.job import MakeJob, assert_account_adds_up
from support.system import System

from headrace.comm.fleet import Fleet
from headrace.comm.messages.base import RowId
from headrace.comm.recipe import Recipe
from headrace.comm.waits import waiting
from headrace.relay import loop as relay_loop
from headrace.relay.hub import loop as hub_loop
from headrace.relay.journal.events import Ending, GroupRestored, Leased, Opened
from headrace.relay.journal.files import read_events
from headrace.relay.journal.hub_state import account_dict
from headrace.relay.journal.replay import replay
from headrace.relay.journal.state import RowStatus
from headrace.relay.queue.saved_queue import SavedList
from headrace.rollout.generators.base import open_generator
from headrace.rollout.loop import Rollout
from headrace.rollout.rewards.pool import open_rewards
from headrace.trainer import loop as trainer_loop

NUM_TOKENS = 16
"""Tokens of the begun trajectory and its prompt at the pause."""
PAUSED = 2
"""The version at which the rollouts pause, one with a finished and a begun trajectory."""
SETTINGS: dict[str, object] = {
    "run.schedule": "sync",
    "generator.exact": True,
    "run.steps": 4,
    "checkpoint.every": 2,
    "run.save_rows": "all",
    "generator.max_running": 1,
    "rollout.stream_tokens": 64,
    "sampling.max_new_tokens": 24,
}


def pausing(is_half: threading.Event, go_on: threading.Event) -> Callable[[Fleet, Recipe], None]:
    """A rollout that pauses at version `PAUSED` when it has finished one trajectory of a group and begun the other."""

    def main(fleet: Fleet, recipe: Recipe) -> None:
        rollout = Rollout(
            fleet,
            recipe,
            open_generator(fleet, recipe),
            open_rewards(recipe.reward, recipe.run.steps, recipe.rollout.engine),
        )
        step = rollout.step

        def pausing_step() -> None:
            step()
            unfinished = rollout.generator.unfinished()
            begun = [live for live in unfinished if live.num_tokens > NUM_TOKENS]
            if rollout.generator.weights.version == PAUSED and begun and len(unfinished) % 2:
                with waiting("the reward process", "the reward of the other trajectory", 60) as wait:
                    wait.until(lambda: rollout._scoring.advance() or len(rollout.leases.held) % 2)
                is_half.set()
                assert go_on.wait(60)

        rollout.step = pausing_step
        rollout.run()

    return main


def interrupted(folder: Path) -> set[RowId]:
    """Interrupt a run with finished and begun rows in its queue; returns the finished ones."""
    is_half, go_on = threading.Event(), threading.Event()
    system = System(folder, **SETTINGS)
    for role, main in (("hub", hub_loop.run), ("relay", relay_loop.run), ("actor", trainer_loop.run)):
        system.start(role, main)
    for index in range(2):
        system.start("rollout", pausing(is_half, go_on), index)
    system.until(is_half.is_set)
    system.interrupt()
    # Before the hub has begun to end the run, a rollout would finish the trajectory that it has begun.
    system.until(lambda: any(isinstance(event, Ending) for event in system.events()))
    go_on.set()
    assert system.wait()["steps"] == PAUSED
    ready = replay(system.dir / "journal.jsonl").rows(RowStatus.READY)
    assert ready
    return {row_id for row_id, _ in ready}


def resumed(folder: Path) -> System:
    system = System(folder, **SETTINGS | {"run.resume": "auto"})
    system.start_all()
    summary = system.wait()
    assert (summary["status"], summary["steps"]) == ("finished", 4)
    account = account_dict(replay(system.dir / "journal.jsonl"))
    assert (account["trained"], account["holds"]) == (4 * 4, True)
    trained = Counter(key for step in range(4) for key in keys_of(system.dir / f"rows/step_{step}.safetensors"))
    assert set(trained.values()) == {1}, "no row is trained twice"
    return system


def keys_of(path: Path) -> set[str]:
    """The names of the rows in a file of the trainer."""
    with safe_open(path, framework="numpy") as file:
        return {name.partition("@")[0] for name in file.keys()}  # noqa: SIM118 - not a mapping


def test_a_resumed_run_generates_no_finished_row_again_and_continues_the_others(tmp_path: Path, capsys):
    queue = interrupted(tmp_path)
    system = resumed(tmp_path)
    events = system.events()
    second = events[max(at for at, event in enumerate(events) if isinstance(event, Opened)) :]
    restored = {row.row for event in second if isinstance(event, GroupRestored) for row in event.rows}
    assert restored == queue
    leased = {event.group.row(n) for event in second if isinstance(event, Leased) for n in event.samples}
    assert not leased & restored
    summary = json.loads((system.dir / "summary.json").read_text())
    assert summary["restored"] == len(restored)
    assert summary["continued"] > 0 and summary["tokens_kept"] > 0
    assert f"the queue continues with {len(restored)} finished and " in capsys.readouterr().out
    (tmp_path / "unbroken").mkdir()
    unbroken = System(tmp_path / "unbroken", **SETTINGS).start_all().wait()
    weights, expected = (load_file(Path(end["export"]) / "model.safetensors") for end in (summary, unbroken))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("is_missing", [True, False])
def test_rows_of_a_queue_file_that_is_lost_or_damaged_are_generated_again(tmp_path: Path, capsys, is_missing: bool):
    interrupted(tmp_path)
    (file,) = tmp_path.glob(f"run/queue/step_{PAUSED}/rows-*.safetensors")
    if is_missing:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    system = resumed(tmp_path)
    assert not any(isinstance(event, GroupRestored) for event in system.events())
    assert "rows of the queue are generated again" in capsys.readouterr().out


def finished_rows(run_dir: Path) -> set[RowId]:
    """The finished rows in the queue that was saved with the newest checkpoint."""
    newest = (run_dir / "checkpoints" / "latest").read_text().strip()
    (path,) = (run_dir / "queue" / newest).glob("rows-*.safetensors")
    with safe_open(path, framework="numpy") as file:
        listed = msgspec.json.decode(file.metadata()["list"], type=SavedList)
    return {row.row for row in listed.rows if not row.is_partial}


@pytest.mark.slow
def test_after_each_of_ten_interrupts_at_random_steps_every_saved_row_is_back(job: MakeJob):
    """Also a measurement: with `-s` it prints a line for each resume."""
    run = job(run__steps=100_000, run__resume="auto", sampling__max_new_tokens=24)
    random, saved = Random(5), set[RowId]()
    for number in range(11):
        num_steps = len(run.metrics())
        run.start().wait_for_step(num_steps + random.randrange(12))
        run.signal(signal.SIGINT)
        code, output = run.end()
        assert code == 130, output + run.logs()
        events = [event for _, event in read_events(run.dir / "journal.jsonl")]
        events = events[max(at for at, event in enumerate(events) if isinstance(event, Opened)) :]
        restored = {row.row for event in events if isinstance(event, GroupRestored) for row in event.rows}
        leased = {event.group.row(n) for event in events if isinstance(event, Leased) for n in event.samples}
        account = assert_account_adds_up(run)
        print(f"resume {number}: {len(saved)} rows saved, {run.summary()['restored']} restored; {account}")
        assert restored == saved and run.summary()["restored"] == len(saved), output
        assert not restored & leased
        saved = finished_rows(run.dir)
