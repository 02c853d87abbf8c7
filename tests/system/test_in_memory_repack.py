"""The whole system in one process while trajectories move between its rollouts, by the hub's orders and at random."""

import json
import math
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.closing import at_end
from support.in_memory import MemoryFleet
from support.system import TURNS, System

from headrace.comm.messages import HeldRows, Interrupted, Message, Stop
from headrace.comm.messages.migration import MigrateOrder, TransferOffered
from headrace.relay.hub import loop as hub_loop
from headrace.relay.hub import repacking
from headrace.relay.journal import events as ev
from headrace.relay.journal.files import read_events
from headrace.relay.journal.hub_state import account_dict
from headrace.relay.journal.replay import replay
from headrace.rollout.generators.base import GeneratorProfile
from headrace.rollout.generators.builtin import BuiltinGenerator

LONG = {
    "run.steps": 4,
    "roles.rollout": 3,
    "optimizer.lr": 0,  # every version has the same weights, so a row's tokens do not depend on the version
    "generator.exact": "true",
    "sampling.max_new_tokens": 60,
    "sampling.temperature": 1.2,
    "repack.period_s": 0.05,
    "queue.lead": 4,
}


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts have measured that eight trajectories are decoded together, and that pages are worth sending."""
    monkeypatch.setattr(BuiltinGenerator, "profile", GeneratorProfile(8, math.inf))
    monkeypatch.setattr(repacking, "SLOWDOWN", math.inf)  # decode steps of a busy machine say little


class RandomMoves:
    """Orders moves at random until the run has ended."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run, name="random moves", daemon=True)
        at_end(self.stop)
        self.thread.start()

    def run(self) -> None:
        mailbox, draw, order = self.system.network.mailboxes.open("random moves"), random.Random(5), 1_000_000
        while not self.ended.wait(0.01):
            source, target = draw.sample(self.system.rollouts, 2)
            for version in range(5):
                order += 1
                mailbox.send(source.name, MigrateOrder(order, version, target.name))

    def stop(self) -> None:
        self.ended.set()
        self.thread.join(60)


def rows_of(system: System) -> dict[str, np.ndarray]:
    """Tokens, log-probs and reward of every trained row, by its name without the attempt."""
    rows: dict[str, np.ndarray] = {}
    for path in (system.dir / "rows").glob("*.safetensors"):
        for key, column in load_file(path).items():
            name, column_name = key.split("/")
            if column_name not in ("versions", "reward_info"):  # the latter has the seconds of the tools
                rows[f"{name.partition('@')[0]}/{column_name}"] = column
    return rows


def test_rows_with_integers_of_any_size_move(tmp_path: Path):
    """Prompts come back whole after each move: here nothing else could give the reward its number."""
    system = System(tmp_path, **LONG, **{"data.path": tmp_path / "numbers.jsonl"})
    rows = [{"prompt": f"say {i}", "answer": 10**30 + i} for i in range(20)]
    (tmp_path / "numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def reward(prompts, completions, answer, **rest):\n"
        "    return [float(n - 10**30 == int(p.split()[1])) for p, n in zip(prompts, answer)]\n"
    )
    system.start_all(num_rollouts=3)
    RandomMoves(system)
    summary = system.wait()
    assert summary["moved"] > 0 and summary["accounting"]["holds"]
    rewards = [value for name, value in rows_of(system).items() if name.endswith("/reward")]
    assert rewards and all(reward == 1 for reward in rewards)


@pytest.mark.parametrize(("has_turns", "max_age"), [(False, None), (True, None), (False, 1)])
def test_moves_do_not_change_a_bit_of_the_trained_rows(tmp_path: Path, has_turns: bool, max_age: int | None):
    outcomes = []
    for folder, has_moves in ((tmp_path / "still", False), (tmp_path / "moved", True)):
        folder.mkdir()
        words = LONG | ({} if has_moves else {"repack.period_s": 0})
        words |= {"rollout.max_age": "never"}
        if has_turns:
            words |= TURNS | {"environment.path": f"{folder / 'environments.py'}:Counter"}
        elif has_moves and max_age is not None:  # new weights under running trajectories change nothing either
            words |= {
                "rollout.max_age": max_age,
                "batch.prompts_per_step": 1,
                "run.steps": 8,
            }
        elif has_moves:
            words |= {"lora.rank": 4}  # without effect, since the learning rate is 0
        system = System(folder, **words).start_all(num_rollouts=3)
        random_moves = RandomMoves(system) if has_moves else None
        summary = system.wait()
        if random_moves is not None:
            random_moves.stop()
        outcomes.append(rows_of(system))
        assert (summary["moved"] > 10) == has_moves
        account = account_dict(replay(system.dir / "journal.jsonl"))
        assert account == summary["accounting"] and account["holds"] and account["trained"] == 16
        assert summary["versions_per_trajectory"] == {"1": 16} or (has_moves and max_age is not None)
    still, moved = outcomes
    both = {
        name for name in still.keys() & moved.keys() if not name.endswith("/weight_digests")
    }  # with LoRA an adapter's
    assert len(both) >= 0.8 * len(still)  # which of the queued groups come last may differ
    assert all(np.array_equal(still[name], moved[name]) for name in both)


WHOLE = """
def reward(prompts, completions):
    assert all(prompts.count(prompt) == 4 for prompt in prompts), "a part of a group"
    longest = {prompt: max(len(c) for p, c in zip(prompts, completions) if p == prompt) for prompt in prompts}
    return [float(len(c) == longest[p]) for p, c in zip(prompts, completions)]
"""


def test_a_reward_that_compares_within_a_group_gets_it_whole_while_its_samples_move(tmp_path: Path):
    (tmp_path / "groups.py").write_text(WHOLE)
    settings = {"reward.path": f"{tmp_path / 'groups.py'}:reward", "reward.batch": "group", "queue.lead": 8}
    system = System(tmp_path, **LONG | settings | {"batch.samples_per_prompt": 4}).start_all(num_rollouts=3)
    random_moves = RandomMoves(system)
    summary = system.wait()
    random_moves.stop()
    assert summary["moved"] > 10 and not summary["failures"]
    assert summary["accounting"]["holds"] and summary["accounting"]["trained"] == 32
    steps = [json.loads(line) for line in (system.dir / "metrics.jsonl").read_text().splitlines()]
    assert all(step["reward/reward"] == pytest.approx(step["reward/mean"]) for step in steps)


def endless(folder: Path, **settings: object) -> System:
    """A run that lasts until it is interrupted."""
    system = System(folder, **LONG | {"run.steps": 100_000, "generator.exact": "false"} | settings)
    return system.start_all(num_rollouts=3)


def moves_of(system: System) -> list[ev.Moved]:
    return [event for _, event in read_events(system.dir / "journal.jsonl") if isinstance(event, ev.Moved)]


def interrupted(system: System) -> dict[str, Any]:
    """Interrupt a run; returns its summary. Its account must hold."""
    system.network.mailboxes.open("test-client").send("hub", Interrupted(2))
    summary = system.wait()
    assert summary["status"] == "interrupted" and summary["accounting"]["holds"] is True
    return summary


@pytest.mark.slow  # rollouts as small as these wind down together only now and then: up to minutes
def test_the_hub_repacks_rollouts_that_wind_down_and_the_account_holds(tmp_path: Path):
    system = endless(tmp_path)
    log = system.dir / "metrics.jsonl"
    system.until(lambda: log.exists() and '"repack/count"' in log.read_text())
    summary = interrupted(system)
    metrics = [json.loads(line) for line in log.read_text().splitlines()]
    assert 0 < sum(step.get("repack/trajectories", 0) for step in metrics) <= summary["moved"]
    assert sum(step.get("repack/seconds", 0) for step in metrics) > 0
    assert any(move.source != move.holder for move in moves_of(system))


@pytest.mark.parametrize("seed", range(2))
def test_a_trajectory_that_moves_when_the_run_is_interrupted_is_counted_once(tmp_path: Path, seed: int):
    system = endless(tmp_path, **{"run.seed": seed})
    random_moves = RandomMoves(system)
    system.wait_for_event("Moved")
    interrupted(system)
    random_moves.stop()


def test_an_offer_without_an_answer_is_counted_at_its_source(tmp_path: Path):
    system = endless(tmp_path, **{"repack.period_s": 60})
    mute = MemoryFleet.join_network(system.network, "rollout", 9)
    inbox = system.network.mailboxes.open(mute.name)
    heard: list[Message] = []

    def hears(kind: type[Message]) -> bool:
        if (envelope := inbox.receive(0)) is not None:
            heard.append(envelope.message)
        return any(isinstance(message, kind) for message in heard)

    def has_an_offer() -> bool:
        for order, version in enumerate(range(400), 1_000_000):
            inbox.send(system.rollouts[0].name, MigrateOrder(order, version, mute.name))
        return hears(TransferOffered)

    system.wait_for_event("Trained")
    system.until(has_an_offer)
    inbox.send("hub", Interrupted(2))
    system.until(lambda: hears(Stop))
    inbox.send("hub", HeldRows([], []))
    mute.leave()
    summary = system.wait()
    assert summary["accounting"]["holds"] is True and summary["accounting"]["in_flight"] > 0


def test_a_rollout_that_seems_to_die_among_moves_costs_nothing(tmp_path: Path):
    system = endless(tmp_path)
    random_moves = RandomMoves(system)
    system.wait_for_event("Moved")

    def has_lost_rows() -> bool:
        system.rollouts[0].crash()
        time.sleep(2.5 * hub_loop.WATCH_S)
        system.rollouts[0].announce(woke="yes")
        return b'"Returned"' in (system.dir / "journal.jsonl").read_bytes()

    system.until(has_lost_rows)
    num_trained = account_dict(replay(system.dir / "journal.jsonl"))["trained"]
    system.until(lambda: account_dict(replay(system.dir / "journal.jsonl"))["trained"] > num_trained + 12)
    interrupted(system)
    random_moves.stop()
