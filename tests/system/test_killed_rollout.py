"""A rollout that is killed while it holds long trajectories, in real processes."""

import json
import os
import signal
from pathlib import Path

import pytest
from support.job import MakeJob, assert_account_adds_up, child_of

from headrace.relay.journal.events import RowReady
from headrace.relay.journal.files import read_events

STREAM_TOKENS, LENGTH = 64, 160

ENGINE = '''
"""The project's generator, slowed down; a file for each process says how many tokens each trajectory has."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

from headrace.rollout.generators.builtin import BuiltinGenerator

FILE = Path(__file__).with_name(f"tokens-{os.getpid()}.json")


class SlowGenerator(BuiltinGenerator):
    def add_group(self, prompt_ids, params, trajectory_ids):
        super().add_group(prompt_ids, replace(params, ignore_eos=True), trajectory_ids)

    def import_sequences(self, states):
        super().import_sequences([replace(s, params=replace(s.params, ignore_eos=True)) for s in states])

    def step(self):
        done = super().step()
        tokens = {part.trajectory_id: len(part.token_ids) for part in self.responses()}
        new = FILE.with_suffix(".new")
        new.write_text(json.dumps(tokens))
        new.replace(FILE)
        time.sleep(0.02)
        return done
'''


@pytest.mark.slow
def test_few_tokens_of_a_killed_rollouts_trajectories_are_generated_again(job: MakeJob):
    settings = {"sampling.max_new_tokens": LENGTH, "rollout.stream_tokens": STREAM_TOKENS, "repack.period_s": 0}
    run = job(run__steps=3, **settings)
    engine = run.folder / "slow.py"
    engine.write_text(ENGINE)
    run.start(**{"rollout.engine": f"{engine}:SlowGenerator"})
    run.until(lambda: any(path.stat().st_size for path in run.folder.glob("tokens-*.json")))
    victim = child_of(run, "rollout-1")
    file = Path(run.folder, f"tokens-{victim}.json")

    def tokens() -> dict[str, int]:
        return json.loads(file.read_text()) if file.exists() else {}

    run.until(lambda: STREAM_TOKENS + 40 < max(tokens().values(), default=0) < LENGTH - 20)
    os.kill(victim, signal.SIGKILL)
    at_death = tokens()
    code, output = run.end()
    assert code == 0, output + run.logs()
    ready = [event for _, event in read_events(run.dir / "journal.jsonl") if isinstance(event, RowReady)]
    kept = {str(event.row.number): event.num_kept for event in ready}
    again = {row: num - kept[row] for row, num in at_death.items() if row in kept}
    assert again and all(0 <= num <= STREAM_TOKENS for num in again.values()), (at_death, kept)
    summary = run.summary()
    assert summary["continued"] == sum(num > 0 for num in kept.values()) > 0
    assert summary["tokens_kept"] == sum(kept.values()) and summary["restarted"] == 0
    assert_account_adds_up(run)
