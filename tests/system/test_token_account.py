"""The account of tokens is true: what the engines drew is what the rows, the journal and the dropped trajectories have."""

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.in_memory import MemoryFleet
from support.system import System

from headrace.comm.fleet import Fleet
from headrace.comm.recipe import Recipe
from headrace.relay import loop as relay_loop
from headrace.relay.hub import loop as hub_loop
from headrace.relay.journal.events import GroupFiltered, RolloutGone, RowFailed, RowReady
from headrace.relay.journal.replay import replay
from headrace.rollout import loop as rollout_loop
from headrace.rollout.engine.sequence import Sequence
from headrace.rollout.generators.base import open_generator
from headrace.rollout.loop import Rollout
from headrace.rollout.rewards.pool import open_rewards
from headrace.trainer import loop as trainer_loop
from headrace.trainer.step_log import StepReplay

ENDS = ("trained", "evaluated", "filtered", "failed", "evicted", "superseded", "lost", "ready", "unfinished")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts every token that an engine of this process takes, by the thread of its rollout."""
    counts: Counter[str] = Counter()
    append = Sequence.append

    def counted(self: Sequence, token: int, logprob: float) -> bool:
        counts[threading.current_thread().name] += 1
        return append(self, token, logprob)

    monkeypatch.setattr(Sequence, "append", counted)
    return counts


def trained_tokens(system: System, num_steps: int) -> int:
    """Tokens with which the policy was trained, from the rows of all steps."""
    batches = [batch for step in range(num_steps) for batch in StepReplay(system.dir, step).batches()]
    return sum(int((batch.columns[row.key]["loss_mask"] != 0).sum()) for batch in batches for row in batch.rows)


def check(system: System, summary: dict[str, Any]) -> dict[str, Any]:
    """Check what holds for every run: both sides are equal, in the summary and, from line to line, in the metrics."""
    tokens = summary["tokens"]
    assert tokens["holds"] and tokens["generated"] + tokens["restored"] == sum(tokens[end] for end in ENDS), tokens
    lines = [json.loads(line) for line in (system.dir / "metrics.jsonl").read_text().splitlines()]
    held = 0
    for line in lines:
        gone = sum(line.get(f"tokens/{end}", 0) for end in ENDS[:-2])
        left = line["tokens/ready"] + line["tokens/unfinished"]
        assert held + line["tokens/generated"] + line.get("tokens/restored", 0) == gone + left
        assert line["tokens/unfinished"] >= 0
        held = left
    assert sum(line["tokens/trained"] for line in lines) == tokens["trained"]
    responses = [line["response_length/mean"] * system.recipe.batch.prompts_per_step * 2 for line in lines]
    if not system.recipe.queue.filter_zero_std and not summary["failures"]:
        assert [line["tokens/trained"] for line in lines] == pytest.approx(responses)
    assert replay(system.dir / "journal.jsonl").tokens.is_balanced
    return tokens


def test_every_token_is_trained_or_dropped_for_a_reason(tmp_path: Path, drawn: Counter[str]):
    """With filtered groups and failed rewards."""
    settings = {"queue.filter_zero_std": "true", "run.steps": 4, "run.save_rows": "all"}
    system = System(tmp_path, **settings)
    (tmp_path / "rewards.py").write_text(
        "def reward(prompts, completions, **rest):\n"
        "    return [None if len(c) % 5 == 4 else float('a' in c) for c in completions]\n"
    )
    summary = system.start_all().wait()
    tokens = check(system, summary)
    events = system.events()
    by_row = {event.row: event.num_drawn for event in events if isinstance(event, RowReady)}
    filtered = {event.group for event in events if isinstance(event, GroupFiltered)}
    assert tokens["generated"] == sum(drawn.values())
    assert tokens["trained"] == trained_tokens(system, 4)
    assert tokens["filtered"] == sum(number for row, number in by_row.items() if row.group in filtered) > 0
    assert tokens["failed"] == sum(event.num_drawn for event in events if isinstance(event, RowFailed)) > 0
    assert tokens["lost"] == tokens["superseded"] == 0


def mortal(fleet: Fleet, recipe: Recipe) -> None:
    """A rollout that dies in the middle of its trajectories, once it is told to."""
    generator = open_generator(fleet, recipe)
    rewards = open_rewards(recipe.reward, recipe.run.steps, recipe.rollout.engine)
    rollout = Rollout(fleet, recipe, generator, rewards)
    rollout.start()
    rollout._wait_for_weights()
    while not (fleet.me.info.get("die") and any(part.num_response > 40 for part in generator.unfinished())):
        rollout.step()
    assert isinstance(fleet, MemoryFleet)
    fleet.crash()
    rollout._row_writer.close()
    rewards.close()
    generator.close()


def test_the_tokens_of_a_rollout_that_dies_are_lost_but_for_those_that_another_continues(
    tmp_path: Path, drawn: Counter[str]
):
    settings = {"run.steps": 10_000, "sampling.max_new_tokens": 60, "rollout.stream_tokens": 8, "run.save_rows": "all"}
    settings |= {"run.schedule": "partial"}  # first tokens are continued under any weights
    system = System(tmp_path, **settings)
    system.start("hub", hub_loop.run)
    system.start("relay", relay_loop.run)
    victim = system.start("rollout", mortal, 0)
    system.start("rollout", rollout_loop.run, 1)
    system.start("actor", trainer_loop.run)
    system.wait_for_event("Trained")
    victim.announce(die="now")
    system.wait_for_event("RolloutGone")
    enough = system.num_steps() + 10
    system.until(lambda: system.num_steps() >= enough)
    system.interrupt()
    tokens = check(system, system.wait())
    events = system.events()
    (gone,) = [event for event in events if isinstance(event, RolloutGone)]
    known = tokens["generated"] - drawn["rollout-1"]  # its last message may arrive after the news of its death
    assert gone.holder == "rollout-0#1" and gone.ended < gone.drawn <= known <= drawn["rollout-0"]
    kept = sum(event.num_kept for event in events if isinstance(event, RowReady))
    assert tokens["lost"] == known - gone.ended - kept >= 0 < kept
    assert tokens["trained"] == trained_tokens(system, system.num_steps())
