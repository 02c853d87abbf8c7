"""The whole system in one process: the loop of every role as a thread, on the in-memory fleet."""

import json
from pathlib import Path

import pytest
from support.in_memory import MemoryFleet
from support.system import PATIENCE_S, System

from headrace.comm.messages import DropRows, LeaseGrant, LeaseRequest, Stop
from headrace.comm.recipe import Recipe
from headrace.relay.journal.events import Leased, Published, Received, Returned, RowReady, TaskHanded
from headrace.relay.journal.hub_state import account_dict
from headrace.relay.journal.replay import replay
from headrace.relay.queue import task_loop
from headrace.trainer import reference_loop
from headrace.trainer.replay.replay import replay_steps as train_again
from headrace.trainer.step_log import StepReplay


def test_all_loops_together_train_and_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    system = System(tmp_path).start_all()
    summary = system.wait()
    assert capsys.readouterr().out.count("generator: lean forward in float32 on cpu, attention 'pool', ") == 1
    assert (summary["status"], summary["steps"], summary["version"]) == ("finished", 3, 3)
    account = account_dict(replay(system.dir / "journal.jsonl"))
    assert account == summary["accounting"]
    assert (account["trained"], account["in_flight"], account["holds"]) == (12, 0, True)


def test_an_interrupt_ends_all_loops_and_counts_trajectories_in_flight(tmp_path: Path):
    system = System(tmp_path, **{"run.steps": 10_000}).start_all()
    system.wait_for_event("Trained")
    system.interrupt()
    summary = system.wait()
    assert (summary["status"], summary["exit_code"]) == ("interrupted", 130)
    assert summary["accounting"]["holds"] is True
    assert Path(summary["export"], "model.safetensors").exists()


@pytest.mark.parametrize("bound", [0, 1])
def test_a_bound_holds_with_many_rollouts(tmp_path: Path, bound: int):
    system = System(tmp_path, **{"queue.max_staleness": bound, "run.steps": 5}).start_all(num_rollouts=3)
    summary = system.wait()
    assert max(int(lag) for lag in summary["staleness"]) <= bound
    assert sum(summary["versions_per_trajectory"].values()) == 20


def test_generator_and_trainer_agree_at_equal_version(tmp_path: Path):
    system = System(tmp_path, **{"queue.max_staleness": 0}).start_all()
    system.wait()
    for line in (system.dir / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        assert metrics["staleness/max"] == 0
        assert metrics["mismatch/logprob_abs_diff"] < 2e-6
        assert abs(metrics["is/mean"] - 1) < 1e-5


def test_generator_and_trainer_agree_bit_for_bit_in_exact_mode(tmp_path: Path):
    system = System(tmp_path, **{"queue.max_staleness": 0, "generator.exact": "true"}).start_all()
    system.wait()
    for line in (system.dir / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["mismatch/logprob_abs_diff"] == 0


def test_every_pull_is_in_the_journal_with_the_digest_that_was_published(tmp_path: Path):
    system = System(tmp_path).start_all()
    system.wait()
    published, received = {}, {}
    for event in system.events():
        if isinstance(event, Published):
            published[event.version] = event.digest
        elif isinstance(event, Received):
            received[event.version] = event.digest
    assert received and all(published[version] == digest for version, digest in received.items())


def test_prompts_that_are_too_long_are_dropped_on_request_and_counted(tmp_path: Path):
    system = System(tmp_path, **{"data.too_long": "drop"})
    rows = [{"prompt": "x" * 300 if i % 4 == 0 else f"say {i}"} for i in range(20)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = system.start_all().wait()
    account = summary["accounting"]
    assert account["trained"] == 12 and account["holds"] is True
    assert account["failed"] == 2 * summary["dropped"] > 0 and "tokens" in summary["drop_reasons"][0]


def test_groups_without_signal_are_filtered_and_replaced(tmp_path: Path):
    system = System(tmp_path, **{"queue.filter_zero_std": "true", "batch.samples_per_prompt": 4})
    summary = system.start_all().wait()
    account = summary["accounting"]
    assert account["trained"] == 3 * 2 * 4 and account["filtered"] > 0 and account["holds"] is True


def test_a_rollout_that_freezes_and_wakes_loses_no_trajectory(tmp_path: Path):
    system = System(tmp_path, **{"run.steps": 10_000, "sampling.max_new_tokens": 60}).start_all()
    system.wait_for_event("Trained")
    system.rollouts[0].crash()
    system.wait_for_event("Returned")
    system.rollouts[0].announce(woke="yes")
    enough = system.num_steps() + 20
    system.until(lambda: system.num_steps() >= enough)
    system.interrupt()
    assert system.wait()["accounting"]["holds"] is True


def test_a_relay_that_dies_takes_no_trajectory_with_it(tmp_path: Path):
    system = System(tmp_path, **{"run.steps": 10_000})
    second = system.start("relay", mortal_relay, 1)
    system.start_all()
    system.wait_for_event("Trained")
    second.announce(die="now")
    system.wait_for_event("UnitLost")
    system.interrupt()
    summary = system.wait()
    assert summary["accounting"]["holds"] is True
    events = system.events()
    copies = [len(event.units) for event in events if isinstance(event, RowReady)]
    assert copies[:4] == [2] * 4


def test_the_leases_of_a_rollout_return_when_its_connection_ends_while_its_heartbeat_continues(tmp_path: Path):
    system = System(tmp_path, **{"run.steps": 10_000, "queue.max_staleness": 1})
    system.start("rollout", mortal_rollout, 7)
    system.start_all()
    system.wait_for_event("Returned")
    system.interrupt()
    assert system.wait()["accounting"]["holds"] is True
    events = system.events()
    leased = {(e.group, e.attempt) for e in events if isinstance(e, Leased) and e.holder == "rollout-7"}
    lost = {(e.group, e.attempt) for e in events if isinstance(e, Returned) and "is gone" in e.reason}
    assert leased == lost


def mortal_rollout(fleet: MemoryFleet, recipe: Recipe) -> None:
    """Takes a lease; then it counts as dead, as after SIGKILL."""
    mailbox = fleet.open_mailbox(fleet.name)
    mailbox.send("hub", LeaseRequest(1, 0, 1))
    envelope = mailbox.receive(PATIENCE_S)
    assert envelope is not None and isinstance(envelope.message, LeaseGrant)
    fleet.crash()
    mailbox.close()


def mortal_relay(fleet: MemoryFleet, recipe: Recipe) -> None:
    """A storage unit that crashes when its member's info says so, without a message."""
    unit = fleet.host_rows()
    fleet.announce(unit=unit.address)
    mailbox = fleet.open_mailbox(fleet.name)
    while "die" not in fleet.me.info:
        envelope = mailbox.receive(0.01)
        if envelope is not None and isinstance(envelope.message, Stop):
            break
        if envelope is not None and isinstance(envelope.message, DropRows):
            unit.drop(envelope.message.keys)
    unit.close()
    fleet.crash()
    mailbox.close()


SPREAD = "def reward(prompts, completions, completion_ids, **rest):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"


def kl_losses(system: System) -> list[float]:
    return [json.loads(line)["actor/kl_loss"] for line in (system.dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("num_references", [0, 2])
def test_a_kl_term_gets_its_reference_from_the_trainers_ranks_or_from_ranks_of_its_own(
    tmp_path: Path, num_references: int
):
    settings = {"algorithm.kl_coef": 0.1, "roles.reference": num_references, "optimizer.lr": 0.01}
    system = System(tmp_path, **settings)
    (tmp_path / "rewards.py").write_text(SPREAD)
    for index in range(num_references):
        system.start("reference", reference_loop.run, index)
    summary = system.start_all().wait()
    assert summary["accounting"]["trained"] == 12 and summary["accounting"]["holds"] is True
    losses = kl_losses(system)
    assert losses[0] < 1e-9, "the KL divergence of the initial policy from itself is zero"
    assert losses[-1] > 1e-6
    state = replay(system.dir / "journal.jsonl")
    record = state.tasks["reference"]
    assert record.is_balanced and record.consumed >= 12
    events = system.events()
    consumers = {event.consumer for event in events if isinstance(event, TaskHanded)}
    assert consumers <= ({f"reference-{i}" for i in range(num_references)} or {"actor-0"})


def test_a_run_with_a_kl_term_is_replayed_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = {"algorithm.kl_coef": 0.1, "optimizer.lr": 0.01, "run.steps": 50}
    system = System(tmp_path, **settings)
    (tmp_path / "rewards.py").write_text(SPREAD)
    system.start_all().wait()
    saved = StepReplay(system.dir, 2)
    batch = next(saved.batches())
    assert [ids.shape for ids in batch["ref_logprobs"]] == [ids.shape for ids in batch["response_ids"]]
    assert train_again(system.recipe) == 0
    assert "50 steps replayed, 0 of them differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    "settings",
    [
        {"batch.updates_per_version": 2, "batch.passes": 2},
        {"batch.updates_per_version": 2, "algorithm.advantage": "gae", "algorithm.kl_coef": 0.1, "algorithm.kl_in": "reward"},
    ],
    ids=["passes", "gae"],
)  # fmt: skip
def test_a_run_with_several_updates_of_a_version_is_replayed_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, object]
):
    wanted = settings | {"batch.prompts_per_step": 4, "optimizer.lr": 0.01, "run.steps": 6}
    system = System(tmp_path, **wanted)
    (tmp_path / "rewards.py").write_text(SPREAD)
    summary = system.start_all().wait()
    assert (summary["version"], summary["accounting"]["holds"]) == (6, True)
    sizes = [len(batch.row_batch.groups) for step in range(6) for batch in StepReplay(system.dir, step).batches()]
    assert max(sizes) <= 2 and sum(sizes) == 24
    assert train_again(system.recipe) == 0
    assert "6 steps replayed, 0 of them differ" in capsys.readouterr().out


TASK = """
import numpy as np

def weigh(columns):
    return {"advantages": [np.full(len(ids), len(ids), dtype=np.float32) for ids in columns["response_ids"]]}
"""


def test_a_users_task_gives_each_row_a_column_before_it_is_trained(tmp_path: Path):
    (tmp_path / "tasks.py").write_text(TASK)
    task = f"{{name: weigh, function: '{tmp_path}/tasks.py:weigh', needs: [response_ids], yields: [advantages]}}"
    system = System(tmp_path, **{"roles.task": 1, "queue.tasks": f"[{task}]"})
    system.start("task", task_loop.run)
    summary = system.start_all().wait()
    assert summary["accounting"]["trained"] == 12 and summary["accounting"]["holds"] is True
    saved = StepReplay(system.dir, 0)
    for batch in saved.batches():
        for advantages, response in zip(batch["advantages"], batch["response_ids"], strict=True):
            assert advantages.tolist() == [len(response)] * len(response)
