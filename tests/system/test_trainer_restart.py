"""A trainer that dies continues in place: its run ends with the weights of a run that nothing disturbed."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.closing import at_end
from support.job import Job, MakeJob, assert_account_adds_up, child_of
from support.system import Died, System, run_until_death

from headrace.comm.fleet import Fleet
from headrace.comm.recipe import Recipe
from headrace.comm.shared_memory import Segment
from headrace.relay.checkpoints import CheckpointFolder
from headrace.relay.hub.hub import MAX_RESTARTS_IN_STEP
from headrace.relay.journal.events import Event, Handed, Published, Trained, TrainerRestarted
from headrace.relay.journal.files import read_events
from headrace.relay.journal.hub_state import account_dict
from headrace.relay.journal.replay import replay
from headrace.trainer import loop as trainer_loop
from headrace.trainer.actor_group import ActorGroup
from headrace.trainer.checkpoint import TrainingState
from headrace.trainer.learners.copy_thread import Pace
from headrace.trainer.learners.state_copies import StateCopies

EXACT: dict[str, object] = {
    "run.schedule": "sync",
    "generator.exact": True,
    "run.steps": 4,
    "checkpoint.every": 3,
    "checkpoint.best": "perf/throughput",  # a step that is trained again has no such number
    "optimizer.lr": 1e-3,
}
REWARD = (
    "def reward(prompts, completions, completion_ids, **rest):\n    return [sum(ids) % 7 for ids in completion_ids]\n"
)
STEP = 2


def dying(method: str, version: int) -> Callable[[Fleet, Recipe], None]:
    """A trainer that dies in the first call of one of its methods at a version of its weights."""

    def main(fleet: Fleet, recipe: Recipe) -> None:
        trainer = trainer_loop.Trainer(fleet, recipe)
        work = getattr(trainer, method)

        def die(*args: object) -> object:
            if trainer.learner.version == version:
                raise Died
            return work(*args)

        setattr(trainer, method, die)
        run_until_death(trainer, fleet)

    return main


def catching_up_slowly(fleet: Fleet, recipe: Recipe) -> None:
    """A trainer whose clock says that each step which is trained again takes 1,000 s."""
    trainer = trainer_loop.Trainer(fleet, recipe)
    now, train_again, num = trainer.clock.now, trainer.train_step_again, 0

    def count(step: int) -> None:
        nonlocal num
        train_again(step)
        num += 1

    trainer.clock.now = lambda: now() + 1000.0 * num
    trainer.train_step_again = count
    trainer.run()


class EachStep(Pace):
    """A copy of the state after each step, whatever it costs."""

    @property
    def steps(self) -> int:
        return 1


@pytest.fixture
def has_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """All incarnations of the trainer have the memory of one supervisor."""
    segment = Segment.create_anonymous("copies")
    at_end(segment.close)

    def of_supervisor(fleet: Fleet, state: TrainingState, group: ActorGroup, run_dir: Path) -> StateCopies:
        copies = StateCopies(Segment.open(segment.path), state, group)
        copies.pace = EachStep(1)
        return copies

    monkeypatch.setattr(StateCopies, "of_supervisor", of_supervisor)


def start(folder: Path, actor: Callable[[Fleet, Recipe], None], **settings: object) -> System:
    folder.mkdir(exist_ok=True)
    (folder / "sums.py").write_text(REWARD)
    system = System(folder, **EXACT | {"reward.path": f"{folder / 'sums.py'}:reward"} | settings)
    system.start_all(actor=actor)
    return system


def end(system: System) -> dict[str, torch.Tensor]:
    """The weights that the run exports; its account holds."""
    summary = system.wait()
    assert (summary["status"], summary["steps"]) == ("finished", 4)
    account = account_dict(replay(system.dir / "journal.jsonl"))
    assert (account["trained"], account["holds"]) == (16, True)
    steps = [json.loads(line) for line in (system.dir / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2, 3] and all(step["actor/grad_norm"] > 0 for step in steps)
    return load_file(Path(summary["export"]) / "model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return end(start(tmp_path_factory.mktemp("undisturbed"), trainer_loop.run))


DEATHS = [
    ("train_step", STEP),
    ("next_batch", STEP),
    ("publish", STEP),  # the hub knows of the step, the relays do not have its weights
    ("checkpoint_if_due", STEP),
    ("checkpoint", 3),
    ("train_step", 3),  # after the checkpoint
    ("finish", 4),
]


@pytest.mark.usefixtures("has_copies")
@pytest.mark.parametrize(("method", "version"), DEATHS)
def test_a_trainer_continues_from_the_newest_copy_in_memory_to_the_weights_of_an_undisturbed_run(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str], method: str, version: int
):
    system = start(tmp_path, dying(method, version))
    system.until(lambda: not system.threads["actor-0"].is_alive())
    system.start("actor", trainer_loop.run)
    weights = end(system)
    assert all(torch.equal(weights[name], undisturbed[name]) for name in weights)
    is_copied = method in ("train_step", "next_batch", "finish")  # the copy begins after all else of a step
    copy = version if is_copied else version - 1
    told = (
        f"actor-0 continues after step {version}: from the copy in memory of step {copy}, {version - copy} steps were"
    )
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(("method", "version"), DEATHS)
def test_a_trainer_that_dies_ends_with_the_weights_of_an_undisturbed_run(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor], method: str, version: int
):
    system = start(tmp_path, dying(method, version))
    system.until(lambda: not system.threads["actor-0"].is_alive())
    system.start("actor", trainer_loop.run)
    weights = end(system)
    assert weights.keys() == undisturbed.keys()
    assert all(torch.equal(weights[name], undisturbed[name]) for name in weights)
    published = [event.version for event in system.events() if isinstance(event, Published)]
    assert published == sorted(set(published)) == list(range(5)), "each version comes out once, in order"


def test_the_time_of_steps_that_are_trained_again_is_not_taken_for_that_of_the_next_step(tmp_path: Path):
    system = start(tmp_path, dying("step_trained", STEP))  # its rows are written, the hub does not know of it
    system.until(lambda: not system.threads["actor-0"].is_alive())
    system.start("actor", catching_up_slowly)
    end(system)
    trained = {event.step: event.busy_s for event in system.events() if isinstance(event, Trained)}
    assert list(trained) == [0, 1, 2, 3] and max(trained.values()) < 500


def test_a_trainer_whose_checkpoint_is_damaged_trains_more_steps_again_and_counts_the_whole_run(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
):
    system = start(tmp_path, dying("train_step", 3))
    system.until(lambda: (system.dir / "checkpoints" / "latest").exists())
    system.until(lambda: not system.threads["actor-0"].is_alive())
    damaged = next((system.dir / "checkpoints/step_3/dcp").glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    system.start("actor", trainer_loop.run)
    weights = end(system)
    assert all(torch.equal(weights[name], undisturbed[name]) for name in weights)
    summary = json.loads((system.dir / "summary.json").read_text())
    last = json.loads((system.dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert summary["time_s"] >= last["time_s"] - 0.01
    num_tokens = replay(system.dir / "journal.jsonl").tokens_trained
    assert summary["tokens_per_s"] * summary["time_s"] == pytest.approx(num_tokens, rel=0.02)


def test_rows_stay_since_the_second_newest_checkpoint_so_a_damaged_one_costs_steps_alone(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
):
    system = start(tmp_path, dying("train_step", 3), **{"checkpoint.every": 1})
    folder = CheckpointFolder(system.dir)
    system.until(lambda: not system.threads["actor-0"].is_alive() and folder.latest() == 3)
    damaged = next((folder.path(3) / "dcp").glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    system.start("actor", trainer_loop.run)
    weights = end(system)
    assert all(torch.equal(weights[name], undisturbed[name]) for name in weights)


def test_a_trainer_that_dies_in_the_same_step_again_and_again_ends_the_run(tmp_path: Path):
    system = start(tmp_path, dying("train_step", STEP))
    for _ in range(MAX_RESTARTS_IN_STEP):
        system.until(lambda: not system.threads["actor-0"].is_alive())
        system.start("actor", dying("train_step", STEP))
    system.until(lambda: not system.threads["actor-0"].is_alive())
    system.start("actor", trainer_loop.run)
    summary = system.wait()
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
    assert "the trainer died 4 times before step 3 was trained" in summary["error"]


def events_of(run: Job) -> list[Event]:
    path = run.dir / "journal.jsonl"
    return [event for _, event in read_events(path)] if path.exists() else []


def is_training(run: Job) -> bool:
    return any(isinstance(event, Handed) and event.step >= STEP for event in events_of(run))


def is_publishing(run: Job) -> bool:
    events = events_of(run)
    return any(isinstance(event, Trained) and event.step == STEP for event in events)


def is_checkpointing(run: Job) -> bool:
    return (run.dir / "checkpoints" / "step_3").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_due", "num_ranks", "victim"),
    [
        (is_training, 1, "actor-0"),
        (is_publishing, 1, "actor-0"),
        (is_checkpointing, 1, "actor-0"),
        (is_training, 2, "actor-0"),
        (is_checkpointing, 2, "actor-1"),
    ],
)
def test_a_killed_trainer_starts_again_alone_and_its_run_is_replayed_bit_for_bit(
    job: MakeJob, is_due: Callable[[Job], bool], num_ranks: int, victim: str
):
    run = job(run__steps=8, run__save_rows="all", roles__actor=num_ranks, checkpoint__every=3).start()
    run.until(lambda: is_due(run), interval_s=0.002)
    os.kill(child_of(run, victim), signal.SIGKILL)
    code, output = run.end()
    assert code == 0, output + run.logs()
    assert f"{victim} was ended by SIGKILL and is started again" in output
    assert "actor-0 continues after step" in output and ": from the copy in memory of step" in output
    assert output.count("is started again") == num_ranks, "all ranks of the trainer start again, and nothing else"
    assert assert_account_adds_up(run)["trained"] == 8 * 16
    assert (
        sum(isinstance(event, TrainerRestarted) for event in events_of(run)) == run.summary()["trainer_restarts"] == 1
    )
    assert "8 steps replayed, 0 of them differ" in run.replayed()
