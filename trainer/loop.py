"""The trainer's loop: accumulate the groups of a step as they become ready, update the weights, publish them.

It consumes groups from the experience queue. It waits for `TrainBatch` messages of the hub (a named wait of rank 0), never for a
rollout. Publishing costs one copy of the weights.
"""

import resource
from pathlib import Path

import torch

from ..comm.clock import Clock
from ..comm.disk import say
from ..comm.errors import SettingError
from ..comm.fleet import Fleet
from ..comm.messages import CheckpointWritten, StepTrained, TrainBatch, TrainingDone
from ..comm.recipe import Recipe
from ..comm.trace import Trace
from ..comm.waits import waited_seconds
from ..relay.queue.batch import TRAIN, Batch
from ..relay.queue.replicated_rows import ReplicatedRows
from ..relay.queue.stream import ExperienceStream, RunStopped, Stream
from ..relay.queue.tasks import REFERENCE
from .checkpoint import CheckpointWriter, is_evaluation
from .learners.base import Learner, open_learner
from .metrics import MetricsLog, Value, console_line, evaluation_line
from .recovery import request_restart, restore_newest, stops, train_again
from .step_log import StepLog
from .step_stats import StepStats


class Trainer:
    """One rank of the trainer. Rank 0 also talks to the hub and writes the run folder."""

    def __init__(
        self,
        fleet: Fleet,
        recipe: Recipe,
        *,
        learner: Learner | None = None,
        stream: Stream | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.recipe = recipe
        self.run_dir = Path(recipe.run.dir)
        self.incarnation = fleet.incarnation
        self.mailbox = fleet.open_mailbox(fleet.name)
        num_trained = -1
        if fleet.me.index == 0 and fleet.incarnation > 1:
            num_trained = request_restart(self.mailbox, fleet.incarnation, recipe.comm.deadline_s)
        self.storage = ReplicatedRows(fleet)
        self.learner = learner or open_learner(fleet, recipe)
        self.group = self.learner.group
        is_resumed = recipe.run.resume == "auto"
        self.first_step = restore_newest(self.learner, self.run_dir, num_trained, is_resumed=is_resumed)
        """The step that the run continues with; those between the checkpoint and this one are trained again."""
        self.step_log = self._open_step_log()
        self.clock = clock or Clock(recipe.emulated.speed)
        self.trace = Trace(self.run_dir, fleet.name, self.clock)
        self.checkpoints = CheckpointWriter(
            self.run_dir, recipe.checkpoint, recipe.comm.deadline_s, is_lead=self.group.is_lead,
            on_written=lambda step, path: self.mailbox.send("hub", CheckpointWritten(step, path)),
        )  # fmt: skip
        self.checkpoints.newest = self.learner.version
        self.recorder = RunRecorder(self) if self.group.is_lead else None
        self.checkpoint_after = -1
        """A checkpoint of a later step than this is wanted, beside those of `checkpoint.every`."""
        self.metrics: dict[str, Value] = {}
        self.evaluates = bool(recipe.eval.paths)
        self.stream = stream or self._open_stream()
        self.waited_s = 0.0
        self.resumed_at = self.clock.now()
        """When the last step ended, or later by the time of a checkpoint since then."""

    def _open_stream(self) -> Stream:
        tasks, recipe = [TRAIN], self.recipe
        if recipe.algorithm.kl_coef > 0 and not recipe.roles.reference:
            tasks.append(REFERENCE.name)
        return ExperienceStream(
            self.mailbox, self.storage, tasks,
            steps=range(self.first_step, recipe.run.steps + self.evaluates),  # after the last one come evaluations
            max_tokens=recipe.optimizer.micro_tokens,
            evaluated=self.recorder.evaluated if self.recorder is not None else -1,
            thread_team=self.group.clone_for_thread(), caller_team=self.group, deadline_s=recipe.comm.deadline_s,
        )  # fmt: skip

    def _open_step_log(self) -> StepLog | None:
        if not self.recipe.run.save_rows:
            return None
        return StepLog(self.run_dir, self.group.rank, self.group.size, self.recipe.comm.deadline_s)

    def run(self) -> None:
        """Publish the first version, then train until the last step or until the hub ends the run."""
        if not self.catch_up():
            self.finish(is_behind=True)
            return
        self.stream.start()
        self.publish()
        try:
            if self.evaluates and self.learner.version >= self.recipe.run.steps:
                self.last_evaluations()  # a process before this one had trained the last step
            while (step := self.learner.version) < self.recipe.run.steps:
                self.train_step(step)
                self.checkpoint_if_due()
        except RunStopped:
            self.learner.discard()
            self.checkpoint_after = self.learner.version
        self.finish()

    def catch_up(self) -> bool:
        """Train the steps after the checkpoint again that the run has trained already; False if the run ends meanwhile."""
        restored, started = self.learner.version, self.clock.now()
        while (step := self.learner.version) < self.first_step:
            if self.group.all_reduce_max([float(self.group.is_lead and stops(self.mailbox))])[0]:
                return False
            self.trace.enter("train again", step=step)
            step_started = self.clock.now()
            stats, self.metrics = train_again(self.learner, self.run_dir, step)
            if self.recorder is not None and step >= self.recorder.next_step:
                self.recorder.step(step, self.clock.now() - step_started, 0.0, stats, self.metrics)
            self.checkpoint_if_due()
        if self.incarnation > 1 and self.group.is_lead:
            seconds, num = self.clock.now() - started, self.first_step - restored
            text = f"actor-0 continues after step {self.first_step}: {num} steps were trained again in {seconds:.1f} s"
            say(text)
        return True

    def train_step(self, step: int) -> None:
        """One optimizer step, from the first group that is ready to the publication of the new version."""
        started, self.waited_s = self.clock.now(), 0.0
        stats, received, total = StepStats(), 0, 1
        fleet_metrics: dict[str, float] = {}
        evaluation: dict[str, float] = {}
        while received < total:
            batch, taken = self.next_groups(step)
            evaluation |= taken.evaluation
            self.checkpoint_after = max(self.checkpoint_after, taken.checkpoint_after)
            if not taken.groups:
                continue
            received, total, fleet_metrics = received + len(taken.groups), taken.total, taken.metrics
            if self.step_log is not None:
                self.step_log.add(batch)
            self.trace.enter("train", step=step)
            self.learner.accumulate(batch, stats)
        if self.step_log is not None:
            self.step_log.write(step)  # before the hub hears of the step: its rows are dropped then
        metrics: dict[str, Value] = {**self.learner.step(stats), **stats.metrics(step)}
        if self.recorder is not None:
            self.mailbox.send("hub", self.step_trained(step))
        metrics |= self.publish()
        step_s, waited_s = self.clock.now() - started, self.waited_s
        if self.evaluates and step + 1 == self.recipe.run.steps:
            evaluation |= self.last_evaluations()
        self.metrics = metrics | fleet_metrics | evaluation
        if self.recorder is not None:
            self.recorder.step(step, step_s, waited_s, stats, self.metrics)

    def checkpoint_if_due(self) -> None:
        """Begin a checkpoint every `checkpoint.every` steps and where the hub asks for one."""
        every = self.recipe.checkpoint.every
        if self.checkpoint_after >= self.checkpoints.newest or (every and self.learner.version % every == 0):
            self.checkpoint()
        self.checkpoints.check()

    def checkpoint(self) -> None:
        """Copy the state of training, which a thread writes while training goes on."""
        started = self.clock.now()
        self.trace.enter("checkpoint")
        best = self.recipe.checkpoint.best
        score = self.metrics.get(best)
        if not isinstance(score, float | int) or is_evaluation(best):
            score = None
            if best and not is_evaluation(best) and self.group.is_lead:
                names = ", ".join(sorted(self.metrics))
                raise SettingError(f"checkpoint.best: a step has no number '{best}'; it has {names}")
        self.checkpoints.begin(self.learner.version, self.learner.stage, score)
        self.resumed_at += self.clock.now() - started

    def step_trained(self, step: int) -> StepTrained:
        """The report of a step, with the seconds since the one before; those of a checkpoint are left out."""
        busy_s, speed = self.clock.now() - self.resumed_at - self.waited_s, self.clock.speed
        self.resumed_at = self.clock.now()
        return StepTrained(step, self.incarnation, busy_s / speed, self.waited_s / speed)

    def next_groups(self, step: int) -> tuple[Batch, TrainBatch]:
        """This rank's share of the next groups of a step; rows of other tasks get their columns meanwhile."""
        while True:
            batch = self.next_batch(step)
            if isinstance(taken := batch.row_batch, TrainBatch):
                if taken.evaluation and self.recorder is not None:
                    self.recorder.evaluation(taken.evaluation)
                    self.checkpoints.score(taken.evaluation)
                return batch, taken
            self.trace.enter(batch.task, step=step)
            self.stream.put(batch, {"ref_logprobs": self.learner.logprobs(batch)})

    def last_evaluations(self) -> dict[str, float]:
        """After the last step: wait for the evaluations that are due; the metrics of the last one."""
        metrics: dict[str, float] = {}
        try:
            while (taken := self.next_groups(self.recipe.run.steps)[1]).total:
                metrics |= taken.evaluation
        except RunStopped:
            say("the run ends before its last evaluation is complete")
        return metrics

    def next_batch(self, step: int) -> Batch:
        """This rank's share of the next batch. Raises `RunStopped` on all ranks when the hub ends the run."""
        started = self.clock.now()
        self.trace.enter("wait", step=step)
        batch = self.stream.next()
        self.waited_s += self.clock.now() - started
        return batch

    def publish(self) -> dict[str, Value]:
        """Publish the present weights to the relays; returns after the copy."""
        started = self.clock.now()
        self.trace.enter("publish")
        self.learner.publish()
        return {"weights/push_s": self.clock.now() - started, "weights/bytes": self.learner.num_bytes}

    def finish(self, *, is_behind: bool = False) -> None:
        """Export the last weights, send the hub the facts for the summary, and close everything.

        is_behind: the weights are those of an earlier step than the run's last, so they are not written.
        """
        self.stream.close()
        is_due = self.recipe.checkpoint.every or self.checkpoint_after >= self.checkpoints.newest
        if is_due and self.learner.version > self.checkpoints.newest and not is_behind:
            self.checkpoint()
        self.checkpoints.close()
        export = "" if is_behind else self.learner.export()
        self.learner.close()
        self.trace.close()
        self.storage.close()
        if self.recorder is not None:
            self.recorder.finish(export if Path(export).exists() else "")
        self.mailbox.close()


class RunRecorder:
    """Rank 0's record of the run: metrics, and the facts for the summary."""

    def __init__(self, trainer: Trainer) -> None:
        self.mailbox = trainer.mailbox
        self.log = MetricsLog(trainer.run_dir, trainer.first_step, trainer.clock, trainer.recipe.comm.deadline_s)
        self.num_steps = trainer.recipe.run.steps
        self.clock = trainer.clock
        self.next_step = 0
        """The first step that has no line in the log."""
        self.rewards: list[float] = []
        self.num_tokens = 0
        self.evaluated = -1
        """The newest version whose evaluation is in the log."""
        for line in self.log.lines():
            self.next_step = line["step"] + 1
            self.rewards.append(line["reward/mean"])
            self.num_tokens += round(line["perf/throughput"] * line["timing_s/step"])
            if "eval/version" in line:
                trainer.checkpoints.score(line)
                self.evaluated = max(self.evaluated, int(line["eval/version"]))

    def step(self, step: int, step_s: float, wait_s: float, stats: StepStats, metrics: dict[str, Value]) -> None:
        tokens = sum(row.num_tokens for row in stats.rows)
        metrics |= {
            "timing_s/step": step_s,
            "timing_s/wait_data": wait_s,
            "idle/actor": wait_s / step_s,
            "perf/throughput": tokens / step_s,
            "perf/max_memory_allocated_gb": _peak_memory_gb(),
            **{f"wait/{whom}": seconds * self.clock.speed for whom, seconds in waited_seconds().items()},
        }
        self.rewards.append(stats.mean_reward)
        self.num_tokens += tokens
        self.log.write(step, metrics)
        say(console_line(step, self.num_steps, metrics))

    def evaluation(self, metrics: dict[str, float]) -> None:
        """Show an evaluation that is complete; the line of the step in progress has it too."""
        self.log.write_evaluation(metrics)
        say(evaluation_line(metrics))

    def finish(self, export: str) -> None:
        """Send the hub the facts for the summary."""
        elapsed_s, num = self.log.elapsed_s, len(self.rewards)
        facts: dict[str, float | int | str] = {"export": export, "time_s": round(elapsed_s, 2)}
        facts["tokens_per_s"] = round(self.num_tokens / max(elapsed_s, 1e-9), 1)
        if tenth := min(max(3, num // 10), num):
            facts["reward_first"] = round(sum(self.rewards[:tenth]) / tenth, 4)
            facts["reward_last"] = round(sum(self.rewards[-tenth:]) / tenth, 4)
        self.log.close()
        self.mailbox.send("hub", TrainingDone(num, facts))


def run(fleet: Fleet, recipe: Recipe) -> None:
    """The trainer's process."""
    Trainer(fleet, recipe).run()


def _peak_memory_gb() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
