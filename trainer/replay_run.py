"""Replay of a finished run: the same batches in the same order give the same losses, however asynchronous the run was.

Asynchrony decides only which trajectories each step trains, and the run folder records that. Each actor rank of the run is a
rank of the replay, with the rows that it trained. Rank 0 is the caller's process; it starts the other ranks.
"""

import itertools
import json
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from ..comm.errors import SettingError
from ..comm.recipe import Recipe
from .actor_group import ActorGroup
from .learners.actor import Actor
from .policy.model import default_device
from .step_log import StepReplay
from .step_metrics import StepMetrics

COMPARED = ("actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/ppo_kl", "is/mean")


def replay_steps(recipe: Recipe) -> int:
    """Train the steps of the run in `run.dir` again from its initial weights, and return how many differ.

    On the machine of the run they are equal bit for bit. Prints one line per step, with the differences. Raises `SettingError`
    if a step's rows are missing, or if another number of ranks than `roles.actor` trained it.
    """
    path = Path(recipe.run.dir) / "metrics.jsonl"
    if not path.exists():
        raise SettingError(f"run.dir: {recipe.run.dir} has no {path.name}; run.mode=replay needs the folder of a run")
    recorded = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [row["step"] for row in recorded]
    for step, rank in itertools.product(steps, range(recipe.roles.actor)):
        StepReplay(Path(recipe.run.dir), step, rank).check_ranks(recipe.roles.actor)
    num_different = 0
    with TemporaryDirectory() as folder, _other_ranks(recipe, steps, folder):
        for row, metrics in zip(recorded, _train(recipe, 0, steps, folder), strict=True):
            changed = [name for name in COMPARED if repr(row[name]) != repr(metrics[name])]  # NaN is NaN
            num_different += bool(changed)
            result = "; ".join(f"{name} {row[name]!r} -> {metrics[name]!r}" for name in changed) or "the same"
            print(f"step {row['step'] + 1:>4}  loss {metrics['actor/pg_loss']:+.6f}  {result}")
    print(f"{len(recorded)} steps replayed, {num_different} of them differ")
    return num_different


@contextmanager
def _other_ranks(recipe: Recipe, steps: list[int], folder: str) -> Iterator[None]:
    """Processes of ranks 1 and later. They end after the last step, or are killed when the body fails."""
    processes = [
        multiprocessing.get_context("spawn").Process(target=_follow, args=(recipe, rank, steps, folder), daemon=True)
        for rank in range(1, recipe.roles.actor)
    ]
    for process in processes:
        process.start()
    try:
        yield
        for process in processes:
            process.join(recipe.comm.deadline_s)
    finally:
        for process in processes:
            process.kill()


def _follow(recipe: Recipe, rank: int, steps: list[int], folder: str) -> None:
    for _ in _train(recipe, rank, steps, folder):
        pass


def _train(recipe: Recipe, rank: int, steps: list[int], folder: str) -> Iterator[dict[str, Any]]:
    """One rank of the replay: yields the metrics of each step. The ranks connect through a file in `folder`."""
    num_ranks = recipe.roles.actor
    device = default_device()
    group = ActorGroup(rank, num_ranks, device, recipe.comm.deadline_s, recipe.trainer)
    if num_ranks > 1:
        if device.type == "cuda":
            group.device = torch.device("cuda", rank)
            torch.cuda.set_device(group.device)
        group.connect(FileStore(f"{folder}/ranks", num_ranks))
    actor = Actor(recipe, group)
    for step in steps:
        saved = StepReplay(Path(recipe.run.dir), step, rank)
        stats = StepMetrics()
        with saved.same_threads():
            for batch in saved.batches():
                actor.accumulate(batch, stats)
            metrics = {**actor.step(stats), **stats.metrics(step)}
        yield metrics
    group.close()
