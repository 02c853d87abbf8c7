"""The folder of a run that an actor without a fleet has trained: its recipe, rows, metrics and checkpoints."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path

from msgspec.structs import replace
from support.actors import actor_of, group_of, row_of, train

from headrace.comm.messages import TrainBatch
from headrace.comm.recipe import Recipe
from headrace.launch.config.load import save_recipe
from headrace.relay.checkpoints import CheckpointFolder
from headrace.relay.queue.batch import Batch
from headrace.trainer.checkpoint import save_state, staged
from headrace.trainer.step_log import StepLog


def stale_batch(step: int, number: int, total: int = 1, staleness: int = 1) -> Batch:
    """A group of three trajectories in two micro-batches; an older version generated those but the first one."""
    group = replace(group_of(step, number), versions=[step, max(step - staleness, 0), max(step - staleness, 0)])
    taken = TrainBatch(step=step, first=number % 100, total=total, groups=[group], metrics={})
    rows = taken.rows()
    columns = {ref.key: row_of(ref.row.prompt, ref.row.sample, ref.num_tokens - 4) for ref in rows}
    return Batch(taken, [rows[:2], rows[2:]], columns)


def trained_run(recipe: Recipe, steps: Sequence[Sequence[Batch]], checkpoints: Collection[int] = ()) -> Path:
    """Train the batches of each step, with checkpoints after these numbers of steps; returns the run folder."""
    run_dir = Path(recipe.run.dir)
    save_recipe(recipe)
    log = StepLog(run_dir, run_id="the run's own")
    folder = CheckpointFolder(run_dir)
    actor = actor_of(recipe)
    lines = []
    for step, batches in enumerate(steps):
        for batch in batches:
            log.add(batch)
        log.write(step)
        lines.append({"step": step, **train(actor, list(batches))})
        if step + 1 in checkpoints:
            path = folder.begin(step + 1)
            save_state(staged(actor.state.state_dict()), path, None)
            folder.seal(step + 1)
            folder.set_latest(step + 1)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir
