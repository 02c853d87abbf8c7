"""The trainer's loop: take the groups of a step as they become ready, update, publish, go on.

Consumes groups from the experience queue; waits for the hub only (a named wait); woken by its `HandOut` letters. It never
waits for a rollout, and publishing costs it one copy.
"""

import time
from pathlib import Path
from typing import Protocol

import torch

from ..comm.fleet import Fleet
from ..comm.messages import ActorDone, CheckpointWritten, StepTrained
from ..comm.settings import CommSettings
from ..comm.waits import waited_seconds
from ..relay.layout import Layout
from ..relay.stream import GroupStream, RunStopped, unit_connector
from ..relay.weights import WeightPublisher
from .actor import Actor, ActorRecipe
from .checkpoint import Checkpoints
from .metrics import MetricsLog, Value, console_line
from .model import load_tokenizer, save_policy
from .tally import StepTally


class TrainerRecipe(ActorRecipe, Protocol):
    """The sections of a recipe that the trainer's loop reads."""

    comm: CommSettings


class Trainer:
    """One actor with its wires: the group stream in, the publisher out, the run folder beside."""

    def __init__(self, fleet: Fleet, recipe: TrainerRecipe) -> None:
        self.recipe = recipe
        self.run_dir = Path(recipe.run.dir)
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        torch.manual_seed(recipe.run.seed)
        self.actor = Actor(recipe, device)
        self.tokenizer = load_tokenizer(recipe.model.path)
        self.checkpoints = Checkpoints(self.run_dir, recipe.checkpoint.keep)
        resume = self.checkpoints.latest() if recipe.run.resume == "auto" else None
        if resume is not None:
            self.checkpoints.load(self.actor.state, resume)
        self.mailbox = fleet.post.open(fleet.name)
        self.stream = GroupStream(self.mailbox, unit_connector(fleet), recipe.comm.deadline_s)
        layout = Layout.of(self.actor.policy.weights(), getattr(torch, recipe.model.dtype))
        self.publisher = WeightPublisher(fleet, layout, recipe.comm)
        self.log = MetricsLog(self.run_dir, self.actor.state.step)
        self.rewards: list[float] = []
        self.num_tokens = 0
        self.export = ""

    def run(self) -> None:
        """Publish what there is, then train until the last step or until the hub ends the run."""
        first = self.actor.state.step
        self.publish()
        try:
            for step in range(first, self.recipe.run.steps):
                self.train_step(step)
                every = self.recipe.checkpoint.every
                if every and (step + 1) % every == 0:
                    self.checkpoint()
        except RunStopped:
            self.actor.optimizer.zero_grad(set_to_none=True)
        self.finish(first)

    def train_step(self, step: int) -> None:
        """One optimizer step, from the first group that is ready to the publication of the new version."""
        started, waited = time.monotonic(), self.stream.waited_s
        tally, received, total = StepTally(), 0, 1
        while received < total:
            groups, total = self.stream.take(step, received)
            received += len(groups)
            self.actor.accumulate(groups, tally)
        metrics: dict[str, Value] = {**tally.metrics(self.actor.version, self.recipe.sampling.max_new_tokens)}
        metrics |= self.actor.step(tally)
        self.mailbox.send("hub", StepTrained(step))
        metrics |= self.publish()
        wait_s, step_s = self.stream.waited_s - waited, time.monotonic() - started
        tokens = sum(t.num_tokens for t in tally.trajectories)
        metrics |= {
            "timing_s/step": step_s,
            "timing_s/wait_data": wait_s,
            "idle/actor": wait_s / step_s,
            "perf/throughput": tokens / step_s,
            "perf/max_memory_allocated_gb": _peak_memory_gb(),
            **{f"wait/{whom}": seconds for whom, seconds in waited_seconds().items()},
            **self.stream.metrics,
        }
        self.rewards.append(tally.mean_reward)
        self.num_tokens += tokens
        self.log.write(step, metrics)
        print(console_line(step, self.recipe.run.steps, metrics), flush=True)

    def publish(self) -> dict[str, Value]:
        """Hand the present weights to the relays; returns after the copy."""
        started = time.monotonic()
        version = self.actor.version
        self.publisher.publish(version, version, self.actor.policy.weights())
        return {"weights/push_s": time.monotonic() - started, "weights/bytes": self.publisher.layout.num_bytes}

    def checkpoint(self) -> None:
        """Write weights for users and the whole training state for `run.resume`."""
        self.save_export()
        path = self.checkpoints.save(self.actor.state)
        self.mailbox.send("hub", CheckpointWritten(self.actor.state.step, str(path)))

    def save_export(self) -> None:
        """The policy in Hugging Face form."""
        path = self.checkpoints.path(self.actor.state.step) / "hf"
        save_policy(self.actor.policy, path, self.tokenizer)
        self.export = str(path)

    def finish(self, first: int) -> None:
        """Export the last weights, tell the hub the facts for the summary, close the wires."""
        if self.checkpoints.latest() != self.actor.state.step or not self.export:
            self.save_export()
        tenth = min(max(3, len(self.rewards) // 10), len(self.rewards))
        facts: dict[str, float | int | str] = {"export": self.export, "time_s": round(self.log.elapsed_s, 2)}
        facts["tokens_per_s"] = round(self.num_tokens / max(self.log.elapsed_s, 1e-9), 1)
        if tenth:
            facts["reward_first"] = round(sum(self.rewards[:tenth]) / tenth, 4)
            facts["reward_last"] = round(sum(self.rewards[-tenth:]) / tenth, 4)
        self.publisher.close()
        self.log.close()
        self.mailbox.send("hub", ActorDone(self.actor.state.step - first, facts))
        self.mailbox.close()


def run(fleet: Fleet, recipe: TrainerRecipe) -> None:
    """The trainer's process."""
    Trainer(fleet, recipe).run()


def _peak_memory_gb() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
