"""Replay of a finished run: the same batches in the same order give the same losses, however asynchronous the run was.

Which trajectories were trained when is the only thing that asynchrony decides about training, and the run folder holds it.
"""

import json
from pathlib import Path

from .actor import Actor
from .model import default_device
from .parallel import ActorGroup
from .recipe import ActorRecipe
from .rowlog import SavedStep
from .tally import StepTally

COMPARED = ("actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/ppo_kl", "is/mean")


def replay(recipe: ActorRecipe) -> int:
    """Train the steps of the run in `run.dir` again from its initial weights, one line per step; returns how many differ.

    Bit for bit on the machine of the run; elsewhere the differences are printed. Raises `SettingError` if a step's rows are
    not there.
    """
    run_dir = Path(recipe.run.dir)
    recorded = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    device = default_device(exact=recipe.generator.exact)
    actor = Actor(recipe, ActorGroup(0, 1, device, deadline_s=0.0))
    num_different = 0
    for row in recorded:
        tally = StepTally(recipe.sampling.max_new_tokens)
        for batch in SavedStep(run_dir, row["step"]).batches():
            actor.accumulate(batch, tally)
        metrics = {**actor.step(tally), **tally.metrics(row["step"])}
        differences = [f"{name} {row[name]!r} -> {metrics[name]!r}" for name in COMPARED if row[name] != metrics[name]]
        num_different += bool(differences)
        print(
            f"step {row['step'] + 1:>4}  loss {metrics['actor/pg_loss']:+.6f}  {'; '.join(differences) or 'the same'}"
        )
    print(f"{len(recorded)} steps replayed, {num_different} of them differ")
    return num_different
