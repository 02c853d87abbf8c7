"""The trainer's loop: take the groups of a step as they become ready, update, publish, go on.

Consumes groups from the experience queue; waits for the hub only (a named wait of rank 0); woken by its `HandOut` letters. It
never waits for a rollout, and publishing costs it one copy.
"""

import resource
import time
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from ..comm.fleet import Fleet
from ..comm.mailbox import Mailbox
from ..comm.messages import ActorDone, CheckpointWritten, HandOut, StepTrained, Stop
from ..comm.settings import CommSettings
from ..comm.waits import waited_seconds
from ..relay.layout import Layout
from ..relay.parts import Part
from ..relay.stream import GroupStream, RunStopped, Units
from ..relay.weights import WeightPublisher
from .actor import Actor, ActorRecipe
from .checkpoint import Checkpoints
from .metrics import MetricsLog, Value, console_line
from .model import load_tokenizer, save_policy
from .parallel import ActorGroup, whole
from .rowlog import RowLog
from .tally import StepTally


class Roles(Protocol):
    """How many ranks the trainer has."""

    actor: int


class TrainerRecipe(ActorRecipe, Protocol):
    """The sections of a recipe that the trainer's loop reads."""

    comm: CommSettings

    @property
    def roles(self) -> Roles:
        """Ranks by role."""
        ...


class Trainer:
    """One rank of the actor with its wires. Rank 0 also talks to the hub and writes the run folder."""

    def __init__(self, fleet: Fleet, recipe: TrainerRecipe) -> None:
        self.recipe = recipe
        self.run_dir = Path(recipe.run.dir)
        has_gpu = torch.cuda.is_available() and not recipe.generator.exact  # exact mode is a promise of the CPU
        device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
        torch.manual_seed(recipe.run.seed)
        self.group = ActorGroup.join(fleet, recipe.roles.actor, device, recipe.comm.deadline_s)
        self.units = Units(fleet)
        self.rows = RowLog(self.run_dir, self.group.rank) if recipe.run.save_rows else None
        self.actor = Actor(recipe, self.group, self.fetch)
        self.tokenizer = load_tokenizer(recipe.model.path)
        self.checkpoints = Checkpoints(self.run_dir, recipe.checkpoint.keep, self.group)
        resume = self.checkpoints.latest() if recipe.run.resume == "auto" else None
        if resume is not None:
            self.checkpoints.load(self.actor.state, resume)
        weights = self.actor.policy.weights()
        layout = Layout.of(weights, recipe.model.dtype)
        part = Part.of(layout, weights, self.group.rank, self.group.size)
        self.publisher = WeightPublisher(fleet, layout, recipe.comm, part)
        self.record = Record(fleet, self) if self.group.is_lead else None
        self.waited_s = 0.0

    def run(self) -> None:
        """Publish what there is, then train until the last step or until the hub ends the run."""
        self.publish()
        try:
            while (step := self.actor.state.step) < self.recipe.run.steps:
                self.train_step(step)
                every = self.recipe.checkpoint.every
                if every and (step + 1) % every == 0:
                    self.checkpoint()
        except RunStopped:
            self.actor.optimizer.zero_grad(set_to_none=True)
        self.finish()

    def train_step(self, step: int) -> None:
        """One optimizer step, from the first group that is ready to the publication of the new version."""
        started, self.waited_s = time.monotonic(), 0.0
        tally, received, total = StepTally(self.recipe.sampling.max_new_tokens), 0, 1
        fleet_metrics: dict[str, float] = {}
        while received < total:
            answer = self.take(step, received)
            received, total, fleet_metrics = received + len(answer.groups), answer.total, answer.metrics
            if self.rows is not None:
                self.rows.add_hand_out(answer)
            self.actor.accumulate(answer.groups, tally)
        metrics: dict[str, Value] = {**self.actor.step(tally), **tally.metrics(step)}
        if self.record is not None:
            self.record.mailbox.send("hub", StepTrained(step))
        metrics |= self.publish()
        if self.rows is not None:
            self.rows.write(step)
        if self.record is not None:
            self.record.step(step, time.monotonic() - started, self.waited_s, tally, metrics | fleet_metrics)

    def take(self, step: int, received: int) -> HandOut:
        """The next groups of the step, on all ranks. Raises `RunStopped` on all of them when the hub ends the run."""
        started = time.monotonic()
        message = None
        if self.record is not None:
            try:
                message = self.record.stream.take(step, received)
            except RunStopped as stopped:
                message = Stop(str(stopped))
        message = self.group.share(message)
        self.waited_s += time.monotonic() - started
        if isinstance(message, Stop):
            raise RunStopped(message.reason)
        assert isinstance(message, HandOut)
        return message

    def fetch(self, unit: str, key: str) -> dict[str, np.ndarray]:
        """A row's columns from its unit, kept for replay."""
        columns = self.units.fetch(unit, key)
        if self.rows is not None:
            self.rows.add_row(key, columns)
        return columns

    def publish(self) -> dict[str, Value]:
        """Hand the present weights to the relays; returns after the copy."""
        started = time.monotonic()
        version = self.actor.version
        self.publisher.publish(version, version, self.actor.policy.weights())
        return {"weights/push_s": time.monotonic() - started, "weights/bytes": self.publisher.layout.num_bytes}

    def checkpoint(self) -> None:
        """Write weights for users and the whole training state for `run.resume`."""
        self.export()
        path = self.checkpoints.save(self.actor.state)
        if self.record is not None:
            self.record.mailbox.send("hub", CheckpointWritten(self.actor.state.step, str(path)))

    def export(self) -> str:
        """The policy in Hugging Face form; returns its folder."""
        path = self.checkpoints.path(self.actor.state.step) / "hf"
        weights = {name: whole(tensor.detach()) for name, tensor in self.actor.policy.weights().items()}
        if self.group.is_lead:
            save_policy(self.actor.policy, path, self.tokenizer, weights)
        return str(path)

    def finish(self) -> None:
        """Export the last weights, tell the hub the facts for the summary, close the wires."""
        export = self.export()
        self.publisher.close()
        self.group.leave()
        if self.record is not None:
            self.record.finish(export)


class Record:
    """What rank 0 keeps of the run: its mailbox to the hub, metrics, and the facts for the summary."""

    def __init__(self, fleet: Fleet, trainer: Trainer) -> None:
        self.mailbox: Mailbox = fleet.post.open(fleet.name)
        self.stream = GroupStream(self.mailbox, trainer.recipe.comm.deadline_s)
        self.log = MetricsLog(trainer.run_dir, trainer.actor.state.step)
        self.num_steps = trainer.recipe.run.steps
        self.rewards: list[float] = []
        self.num_tokens = 0

    def step(self, step: int, step_s: float, wait_s: float, tally: StepTally, metrics: dict[str, Value]) -> None:
        """Write down one step."""
        tokens = sum(reference.num_tokens for reference in tally.references)
        metrics |= {
            "timing_s/step": step_s,
            "timing_s/wait_data": wait_s,
            "idle/actor": wait_s / step_s,
            "perf/throughput": tokens / step_s,
            "perf/max_memory_allocated_gb": _peak_memory_gb(),
            **{f"wait/{whom}": seconds for whom, seconds in waited_seconds().items()},
        }
        self.rewards.append(tally.mean_reward)
        self.num_tokens += tokens
        self.log.write(step, metrics)
        print(console_line(step, self.num_steps, metrics), flush=True)

    def finish(self, export: str) -> None:
        """Tell the hub the facts for the summary."""
        elapsed_s, num = self.log.elapsed_s, len(self.rewards)
        facts: dict[str, float | int | str] = {"export": export, "time_s": round(elapsed_s, 2)}
        facts["tokens_per_s"] = round(self.num_tokens / max(elapsed_s, 1e-9), 1)
        if tenth := min(max(3, num // 10), num):
            facts["reward_first"] = round(sum(self.rewards[:tenth]) / tenth, 4)
            facts["reward_last"] = round(sum(self.rewards[-tenth:]) / tenth, 4)
        self.log.close()
        self.mailbox.send("hub", ActorDone(num, facts))
        self.mailbox.close()


def run(fleet: Fleet, recipe: TrainerRecipe) -> None:
    """The trainer's process."""
    Trainer(fleet, recipe).run()


def _peak_memory_gb() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
