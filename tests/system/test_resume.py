"""A run that is resumed continues after its last step, and ends with the weights of a run that nothing disturbed."""

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.job import Job, MakeJob, assert_account_adds_up, descendants_of
from support.system import System

from headrace.comm.fleet import Fleet
from headrace.comm.recipe import Recipe
from headrace.launch.resume import choose_point
from headrace.relay.journal.events import Checkpointed, Ended
from headrace.relay.journal.hub_state import account_dict
from headrace.relay.journal.replay import replay
from headrace.relay.weights.copies_on_disk import CopiesOnDisk
from headrace.trainer import loop as trainer_loop
from headrace.trainer.progress import progress_line

EXACT: dict[str, object] = {"run.schedule": "sync", "generator.exact": True, "run.steps": 4, "optimizer.lr": 1e-3}
STEP = 3
"""The number of steps that are trained when the trainer dies."""


class Died(Exception):
    """The end of a trainer in the middle of its work."""


def dying(fleet: Fleet, recipe: Recipe) -> None:
    """A trainer that dies in its step after `STEP`."""
    trainer = trainer_loop.Trainer(fleet, recipe)
    train_step = trainer.train_step

    def die(step: int) -> None:
        if step == STEP:
            raise Died
        train_step(step)

    trainer.train_step = die
    with pytest.raises(Died):
        trainer.run()
    trainer.stream.close()
    trainer.learner.close()
    trainer.storage.close()
    trainer.mailbox.close()


def catching_up(has_begun: threading.Event, go_on: threading.Event) -> Callable[[Fleet, Recipe], None]:
    """A trainer that pauses when it has trained one step again."""

    def main(fleet: Fleet, recipe: Recipe) -> None:
        trainer = trainer_loop.Trainer(fleet, recipe)
        train_again = trainer.train_step_again

        def pause(step: int) -> None:
            train_again(step)
            if step == 0:
                has_begun.set()
                assert go_on.wait(60)

        trainer.train_step_again = pause
        trainer.run()

    return main


def killed(folder: Path, **settings: object) -> System:
    """A run whose trainer is dead after `STEP` steps, without a checkpoint of them."""
    folder.mkdir(exist_ok=True)
    system = System(folder, **EXACT | settings)
    system.start_all(actor=dying)
    system.until(lambda: not system.threads["actor-0"].is_alive())
    return system


def end_without_trainer(system: System) -> None:
    system.interrupt()
    assert system.wait()["status"] == "interrupted"
    assert not (system.dir / "checkpoints/latest").exists()


def weights_of(system: System) -> dict[str, torch.Tensor]:
    summary = system.wait()
    assert (summary["status"], summary["steps"]) == ("finished", EXACT["run.steps"])
    account = account_dict(replay(system.dir / "journal.jsonl"))
    assert (account["trained"], account["holds"]) == (16, True)
    assert [f'"step": {step}' in line for step, line in enumerate(lines_of(system))] == [True] * 4
    return load_file(Path(summary["export"]) / "model.safetensors")


def lines_of(system: System) -> list[str]:
    return (system.dir / "metrics.jsonl").read_text().splitlines()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return weights_of(System(tmp_path_factory.mktemp("undisturbed"), **EXACT).start_all())


def test_a_run_that_dies_before_its_first_checkpoint_continues_after_its_last_step(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
):
    end_without_trainer(killed(tmp_path))
    before = lines_of(killed_run := System(tmp_path, **EXACT | {"run.resume": "auto"}))
    weights = weights_of(killed_run.start_all())
    assert all(torch.equal(weights[name], undisturbed[name]) for name in undisturbed)
    assert lines_of(killed_run)[:STEP] == before
    output = capsys.readouterr().out
    assert f"training {STEP} steps again from rows/, after the initial weights" in output
    assert (
        f"actor-0 continues after step {STEP}: from the initial weights, {STEP} steps were trained again in" in output
    )


def test_a_run_that_is_interrupted_while_steps_are_trained_again_says_what_there_is_and_loses_nothing(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
):
    system, has_begun, go_on = killed(tmp_path), threading.Event(), threading.Event()
    system.start("actor", catching_up(has_begun, go_on))
    system.until(has_begun.is_set)
    system.interrupt()
    system.wait_for_event("Ending")
    go_on.set()
    summary = system.wait()
    assert (summary["status"], summary["steps"], summary["export"]) == ("interrupted", STEP, "")
    assert "ends after 1 of its 3 steps were trained again; nothing is lost" in capsys.readouterr().out
    assert [event.step for event in system.events() if isinstance(event, Checkpointed)] == [1]
    again = System(tmp_path, **EXACT | {"run.resume": "auto"})
    assert choose_point(again.recipe)[:2] == (STEP, 1)
    weights = weights_of(again.start_all())
    assert all(torch.equal(weights[name], undisturbed[name]) for name in undisturbed)


def test_a_run_ends_with_a_checkpoint_that_the_journal_has_before_its_end(tmp_path: Path):
    system = System(tmp_path, **{"checkpoint.every": 0, "run.steps": 2}).start_all()
    assert system.wait()["status"] == "finished"
    events = [event for event in system.events() if isinstance(event, Checkpointed | Ended)]
    assert [type(event) for event in events] == [Checkpointed, Ended]
    assert choose_point(system.recipe)[:2] == (2, 2)


@pytest.mark.parametrize(("every", "steps"), [("null", [1, 2, 3]), (2, [2, 3]), (0, [3])])
def test_a_checkpoint_is_written_every_half_hour_or_every_so_many_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: object, steps: list[int]
):
    monkeypatch.setattr(trainer_loop, "CHECKPOINT_PERIOD_S", 0.0)
    settings = {"checkpoint.every": every, "checkpoint.keep": 9, "run.steps": 3}
    system = System(tmp_path, **settings).start_all()
    assert system.wait()["status"] == "finished"
    assert [event.step for event in system.events() if isinstance(event, Checkpointed)] == steps


def test_the_time_left_is_told_from_the_steps_that_are_done():
    assert progress_line([], 39) == "training steps again: 0 of 39"
    assert progress_line([20.0 * (step + 1) for step in range(12)], 39) == (
        "training steps again: 12 of 39, about 9 min left"
    )
    assert progress_line([3.0, 5.0], 4) == "training steps again: 2 of 4, about 5 s left"


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_whose_store_is_killed_continues_from_the_copies_in_memory_to_the_bits_of_an_undisturbed_run(
    job: MakeJob, tmp_path: Path, num_ranks: int
):
    """Through the launcher. The supervisors write what they have in memory; no checkpoint is written."""
    is_exact = num_ranks == 1
    settings = {"run__schedule": "sync", "run__steps": 12, "checkpoint__every": 0}
    settings |= {"roles__actor": num_ranks, "generator__exact": is_exact}
    unbroken, broken = (job(run__dir=tmp_path / name, **settings) for name in ("unbroken", "broken"))
    for run, name in ((unbroken, "unbroken"), (broken, "broken")):
        run.dir = tmp_path / name
    unbroken.run()
    broken.start().wait_for_step(5)
    os.kill(store_of(broken), signal.SIGKILL)
    code, output = broken.end()
    assert code == 1 and "the actors write their copies of the training state after step " in output, output
    assert not (broken.dir / "checkpoints/latest").exists()
    saved = CopiesOnDisk(broken.dir)
    assert saved.newest(0, 12, num_ranks)[0]
    output = broken.run(**{"run.resume": "auto"})
    point, copy = re.findall(r"continues after step (\d+), from the copy of .*/memory/step_(\d+)", output)[0]
    assert 1 <= int(copy) <= int(point) and "checkpoint that can be used" not in output
    if int(copy) < int(point):
        assert f"actor-0 continues after step {point}: from the copy in the run folder of step {copy}, " in output
    assert_account_adds_up(broken)
    weights, exact = (load_file(Path(run.summary()["export"]) / "model.safetensors") for run in (broken, unbroken))
    assert all(torch.equal(weights[name], exact[name]) for name in exact) or not is_exact
    assert not saved.root.exists(), "the last checkpoint is newer"


def store_of(run: Job) -> int:
    """Process id of the run's store."""
    assert run.process is not None
    for pid in descendants_of(run.process.pid):
        if b"headrace.comm.store\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("no store")


@pytest.mark.slow
def test_a_killed_run_without_a_checkpoint_is_resumed_and_may_be_interrupted_while_it_catches_up(job: MakeJob):
    """Through the launcher: every process is killed; the run is resumed, interrupted meanwhile, and resumed again."""
    run = job(run__steps=60).start()
    run.wait_for_step(20)
    assert run.process is not None
    for pid in (run.process.pid, *descendants_of(run.process.pid)):
        os.kill(pid, signal.SIGKILL)
    run.end()
    before = (run.dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    run.start(**{"run.resume": "auto"})
    run.until(lambda: "steps again from rows/" in run.console.read_text())
    run.signal(signal.SIGINT)
    code, output = run.end()
    assert code == 130 and "Traceback" not in output, output + run.logs()
    assert "it has no checkpoint that can be used; steps 1 to " in output
    output = run.run()
    assert "the run continues after step " in output
    after = (run.dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert after[: len(before) - 1] == before[:-1], "the hub may not have heard of the last one"
    assert [m["step"] for m in run.metrics()] == list(range(60))
    assert assert_account_adds_up(run)["trained"] == 60 * 16
    before = [(run.dir / "metrics.jsonl").read_bytes()]
    assert "finished after step 60; raise run.steps to continue" in run.run()
    assert [(run.dir / "metrics.jsonl").read_bytes()] == before
