"""Every version that a rollout pulls has the weights of the trainer with which the run continues."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from support.system import System

from headrace.comm.clock import Clock
from headrace.comm.fleet import Fleet
from headrace.comm.messages import DropRows
from headrace.comm.recipe import Recipe
from headrace.relay import loop as relay_loop
from headrace.relay.hub import loop as hub_loop
from headrace.relay.journal.events import Event, Published, Received, Trained
from headrace.relay.journal.hub_state import account_dict
from headrace.relay.journal.records import RowStatus
from headrace.relay.journal.replay import replay
from headrace.relay.queue.batch import Batch
from headrace.relay.queue.stream import AfterLastStep
from headrace.rollout import loop as rollout_loop
from headrace.trainer.learners.builtin import ActorLearner
from headrace.trainer.loop import Trainer
from headrace.trainer.record.metrics_log import Value

REWARD = (
    "def reward(prompts, completions, completion_ids, **rest):\n    return [sum(ids) % 7 for ids in completion_ids]\n"
)
STEP = 2
"""The step whose report the hub does not survive."""


class Died(Exception):
    """The end of a process in the middle of its work."""


def dying_hub(fleet: Fleet, recipe: Recipe) -> None:
    """A hub that dies when it should write that `STEP` is trained. Messages that it sent before that are delivered."""
    hub = hub_loop.open_hub(fleet, recipe, Clock())
    journal, loop = hub.context.journal, hub_loop.HubLoop(hub, fleet)
    append = journal.append

    def die(event: Event) -> None:
        if isinstance(event, Trained) and event.step == STEP:
            raise Died
        append(event)

    journal.append = die
    with pytest.raises(Died):
        while loop.step() is None:
            pass
    journal.close()
    fleet.mailboxes.close_inbox("hub")  # messages to it wait for its next process


def trainer(lineage: dict[int, str], dies_at: int = -1) -> Callable[[Fleet, Recipe], None]:
    """A trainer that notes the digest of each version that it publishes, and dies when it waits for rows at a version."""

    def main(fleet: Fleet, recipe: Recipe) -> None:
        trainer = Trainer(fleet, recipe)
        publish, next_batch, learner = trainer.publish, trainer.next_batch, trainer.learner
        assert isinstance(learner, ActorLearner)

        def noted() -> dict[str, Value]:
            layout = learner.publisher.layout
            buffer = np.zeros(layout.num_bytes, np.uint8)
            layout.write(learner.policy.weights(), buffer)
            lineage[learner.version] = layout.digest(buffer)
            return publish()

        def mortal(step: int) -> Batch | AfterLastStep:
            if learner.version == dies_at:
                raise Died
            return next_batch(step)

        trainer.publish, trainer.next_batch = noted, mortal
        if dies_at < 0:
            trainer.run()
            return
        with pytest.raises(Died):
            trainer.run()
        trainer.checkpoints.close()
        trainer.stream.close()
        learner.close()
        trainer.storage.close()
        fleet.mailboxes.close_inbox(fleet.name)

    return main


@pytest.mark.parametrize("are_lost", [False, True], ids=["rows are there", "rows are lost"])
def test_hub_and_trainer_that_die_around_a_step_leave_no_version_outside_of_the_trained_lineage(
    tmp_path: Path, are_lost: bool
):
    lineage: dict[int, str] = {}
    (tmp_path / "sums.py").write_text(REWARD)
    system = System(tmp_path, **{"run.steps": 5, "optimizer.lr": 1e-3, "reward.path": f"{tmp_path / 'sums.py'}:reward"})
    system.start("hub", dying_hub)
    system.start("relay", relay_loop.run)
    for index in range(2):
        system.start("rollout", rollout_loop.run, index)
    system.start("actor", trainer(lineage, dies_at=STEP + 1))
    system.until(lambda: not (system.threads["hub"].is_alive() or system.threads["actor-0"].is_alive()))
    state = replay(system.dir / "journal.jsonl")
    assert state.step == STEP and STEP + 1 in lineage, "the version of a step that the hub has not counted is out"
    system.network.mailboxes.forget("actor-0")
    if are_lost:  # with a relay that dies too
        groups = [state.groups[group_id] for group_id in state.in_training]
        keys = [group.row_id(n).key(group.rows[n].attempt) for group in groups for n in group.samples(RowStatus.READY)]
        mailbox = system.network.mailboxes.open("test")
        mailbox.send("relay-0", DropRows(keys))
        mailbox.close()
    system.start("hub", hub_loop.run)
    system.start("actor", trainer(lineage))
    summary = system.wait()
    assert (summary["status"], summary["steps"], summary["trainer_restarts"]) == ("finished", 5, 1)
    assert account_dict(replay(system.dir / "journal.jsonl"))["holds"] is True
    pulled = [event for event in system.events() if isinstance(event, Published | Received)]
    assert STEP + 1 in {event.version for event in pulled if isinstance(event, Received)}
    assert len(set(lineage.values())) == len(lineage) == 6, "each step changed the weights"
    assert all(lineage[event.version] == event.digest for event in pulled)
    trained = Counter(key for step in range(5) for key in keys_of(system.dir / f"rows/step_{step}.safetensors"))
    assert set(trained.values()) == {1} and len(trained) == summary["accounting"]["trained"] == 5 * 4


def keys_of(path: Path) -> set[str]:
    """The names of the rows in a file of the trainer."""
    with safe_open(path, framework="numpy") as file:
        return {name.partition("@")[0] for name in file.keys()}  # noqa: SIM118 - not a mapping
