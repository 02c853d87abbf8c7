"""The trainer's loop: accumulate the groups of a step as they become ready, update the weights, publish them.

It consumes groups from the experience queue. It waits for `TrainBatch` messages of the hub (a named wait of rank 0), never for a
rollout. Publishing costs one copy of the weights.
"""

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..comm.clock import REAL_TIME, Clock
from ..comm.disk import say, tell
from ..comm.fleet import TRAINS_AGAIN, Fleet
from ..comm.host_memory import give_back_heap
from ..comm.messages import (
    CheckpointWritten,
    EvaluationResult,
    RestartPoint,
    StepTrained,
    TrainBatch,
    TrainerState,
)
from ..comm.recipe import Recipe
from ..comm.trace import Trace
from ..relay.queue.batch import TRAIN, Batch
from ..relay.queue.replicated_rows import ReplicatedRows
from ..relay.queue.stream import AfterLastStep, ExperienceStream, RunStopped, Stream
from ..relay.queue.tasks import REFERENCE
from .algorithms.objective import has_gradient
from .checkpoint import CHECKPOINT_PERIOD_S, CheckpointWriter
from .learners.base import Learner, open_learner
from .progress import behind_line, progress
from .record.metrics_log import Value
from .record.recorder import RunRecorder
from .recovery import copies_of, has_rows, micro_tokens, request_restart, restore_newest, stops, train_again
from .step_log import StepLog
from .step_metrics import StepMetrics

log = logging.getLogger(__name__)

_STATES = {"wait": "waits", "checkpoint": "saves", "train again": "trains again"}
"""What the status of the run calls the states of the trace; all others are training."""
_CHECKPOINTS_WITH_ROWS = 2
"""Number of the newest checkpoints after which rows are kept: if the last one is damaged, training resumes from the one before."""


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
        self.fleet = fleet
        self.incarnation = fleet.incarnation
        self.mailbox = fleet.open_mailbox(fleet.name)
        point = RestartPoint(fleet.incarnation, -1)
        continues = fleet.incarnation > 1 or recipe.run.resume == "auto"
        if fleet.me.index == 0 and continues:
            point = request_restart(self.mailbox, fleet.incarnation, recipe.comm.deadline_s)
        self.storage = ReplicatedRows(fleet)
        began = time.monotonic()
        if fleet.me.index == 0:
            tell(f"{fleet.name} loads {recipe.model.path or 'the policy'}")
        self.learner = learner or open_learner(fleet, recipe)
        self.group = self.learner.group
        is_checked = fleet.incarnation == 1
        self.restored = restore_newest(self.learner, self.run_dir, point.step, is_checked=is_checked)
        self.first_step = self.restored.first_step
        """The step that the run continues with; those between the restored state and this one are trained again."""
        if self.group.is_lead:
            tell(f"{fleet.name} has loaded {self.restored.source} in {time.monotonic() - began:.1f} s")
        self.num_counted = self.first_step
        """Steps that the hub has counted; the previous trainer process may have trained one more."""
        self.run_id = fleet.run_id
        self.first_step += has_rows(self.learner, self.run_dir, self.first_step, self.run_id)
        self.micro_tokens = self._choose_micro_tokens(point.num_memory_deaths)
        self.step_log = self._open_step_log()
        self.clock = clock or REAL_TIME
        self.trace = Trace(self.run_dir, fleet.name, self.clock)
        self.checkpoints = CheckpointWriter(
            self.run_dir, recipe.checkpoint, recipe.comm.deadline_s, is_lead=self.group.is_lead,
            on_written=lambda step, path: self.mailbox.send("hub", CheckpointWritten(step, path)),
        )  # fmt: skip
        self.checkpoints.newest = self.restored.checkpoint
        self.copies = copies_of(self.learner)
        self.recorder = self._open_recorder() if self.group.is_lead else None
        self.checkpoint_after = -1
        """The hub has requested a checkpoint of a later step than this, in addition to those that are due."""
        self.checkpointed_at = time.monotonic()
        """When the last checkpoint was begun, or this process."""
        self.stops_at_collapse = recipe.run.on_collapse == "stop"
        self.has_collapsed = False
        """An alarm has ended the run: the weights of now are not worth a checkpoint."""
        self.told = ""
        """The last state that the hub was told."""
        self.metrics: dict[str, Value] = {}
        self.evaluates = bool(recipe.eval.paths)
        self.stream = stream or self._open_stream()
        self.waited_s = 0.0
        self.resumed_at = self.clock.now()
        """When the last step ended, or later by the time of a checkpoint since then."""

    def _open_stream(self) -> Stream:
        tasks = [TRAIN]
        recipe = self.recipe
        if recipe.algorithm.kl_coef > 0 and not recipe.roles.reference:
            tasks.append(REFERENCE.name)
        return ExperienceStream(
            self.mailbox, self.storage, tasks,
            steps=range(self.first_step, recipe.run.steps + self.evaluates),  # after the last one come evaluations
            max_tokens=self.micro_tokens,
            longest_in_tree=getattr(self.learner, "longest_in_tree", 0),  # a user's learner may not have it
            evaluated=self.recorder.evaluated if self.recorder is not None else -1,
            needs_gradient=partial(has_gradient, recipe.algorithm, recipe.queue.tasks),
            thread_team=self.group.clone_for_thread(), caller_team=self.group, deadline_s=recipe.comm.deadline_s,
        )  # fmt: skip

    def _open_recorder(self) -> RunRecorder:
        def tokenizer() -> Any:
            found = getattr(self.learner, "tokenizer", None)  # a user's learner may not have it
            if found is not None or not self.has_state:
                return found
            from .policy.model import load_tokenizer  # emulated devices load no library of models

            return load_tokenizer(self.recipe.model.path)

        return RunRecorder(
            self.recipe,
            self.mailbox,
            self.checkpoints,
            self.clock,
            first_step=self.first_step,
            open_tokenizer=tokenizer,
        )

    def _choose_micro_tokens(self, num_memory_deaths: int) -> int:
        """The size of a micro-batch on all ranks; a collective. Rank 0 knows how often the memory was full."""
        configured = self.recipe.optimizer.micro_batch
        found = self.group.all_reduce_max([float(num_memory_deaths)])
        chosen = micro_tokens(configured, int(found[0]))
        if chosen < configured and self.group.is_lead:
            say(
                f"the memory of the trainer's GPU was full: a micro-batch has at most {chosen} tokens now, instead of"
                f" optimizer.micro_tokens={configured}"
            )
        return chosen

    def _open_step_log(self) -> StepLog | None:
        recipe = self.recipe
        num_checkpoints = 0
        if recipe.run.save_rows == "none":
            return None
        if recipe.run.save_rows == "recovery":
            num_checkpoints = min(recipe.checkpoint.keep, _CHECKPOINTS_WITH_ROWS)
        ranks = (self.group.rank, self.group.size)
        deadline_s = recipe.comm.deadline_s
        return StepLog(self.run_dir, *ranks, deadline_s, self.run_id, num_checkpoints)

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
            while (step := self.learner.version) < self.recipe.run.steps and not self.has_collapsed:
                self.train_step(step)
                self.checkpoint_if_due()
        except RunStopped:
            self.learner.discard()
            self.checkpoint_after = self.learner.version
        self.finish()

    def catch_up(self) -> bool:
        """Train the steps after the checkpoint again that the run has trained already; False if the run ends meanwhile."""
        started = self.clock.now()
        num = self.first_step - self.learner.version
        if num:
            self.fleet.announce(**{TRAINS_AGAIN: "yes"})  # rollouts wait for the first version meanwhile
            with progress(num, self.restored.source, is_shown=self.group.is_lead) as step_done:
                while (step := self.learner.version) < self.first_step:
                    if self.group.all_reduce_max([float(self.group.is_lead and stops(self.mailbox))])[0]:
                        return False
                    self.train_step_again(step)
                    step_done()
            self.fleet.announce(**{TRAINS_AGAIN: ""})
            self.resumed_at = self.clock.now()
        if (num or self.incarnation > 1) and self.group.is_lead:
            seconds = self.clock.now() - started
            again = f"{num} steps were trained again in {seconds:.1f} s"
            say(f"actor-0 continues after step {self.first_step}: from {self.restored.source}, {again}")
        return True

    def train_step_again(self, step: int) -> None:
        """Train a step from its saved rows, and write the line of metrics that a previous process may not have written."""
        self.enter("train again", step)
        started = self.clock.now()
        # The trainer before may have died of this very step. The others have succeeded as they are.
        give_back_heap()
        num_parts = 1 if step < self.num_counted else self.recipe.optimizer.micro_batch // self.micro_tokens
        stats, self.metrics = train_again(self.learner, self.run_dir, step, num_parts, self.recipe.run.samples)
        if self.recorder is not None and step >= self.recorder.next_step:
            self.recorder.step(step, self.clock.now() - started, 0.0, stats, self.metrics)
        if self.recorder is not None and step >= self.num_counted:
            self.mailbox.send("hub", StepTrained(step, self.incarnation))
        self.checkpoint_if_due()

    def train_step(self, step: int) -> None:
        """One optimizer step, from the first group that is ready to the publication of the new version."""
        started = self.clock.now()
        self.waited_s = 0.0
        stats = StepMetrics(self.recipe.run.samples)
        fleet_metrics: dict[str, float] = {}
        evaluation: dict[str, float] = {}
        is_complete = False
        while not is_complete:
            batch = self.next_for_training(step)
            assert isinstance(batch, Batch) and isinstance(batch.row_batch, TrainBatch), "the step has groups to come"
            taken = batch.row_batch
            self.record_evaluation(taken.evaluation)
            evaluation |= taken.evaluation
            self.checkpoint_after = max(self.checkpoint_after, taken.checkpoint_after)
            fleet_metrics = taken.metrics
            is_complete = taken.ends_step
            if self.step_log is not None:
                self.step_log.add(batch)
            self.enter("train", step)
            self.learner.accumulate(batch, stats)
        if self.step_log is not None:
            self.step_log.write(step)  # before the hub hears of the step: its rows are dropped then
        metrics: dict[str, Value] = {**self.learner.step(stats), **stats.metrics(step)}
        if self.recorder is not None:
            self.mailbox.send("hub", self.step_trained(step))
        metrics |= self.publish()
        if self.copies is not None:
            metrics |= self.copies.figures()
        step_s = self.clock.now() - started
        waited_s = self.waited_s
        if self.evaluates and step + 1 == self.recipe.run.steps:
            evaluation |= self.last_evaluations()
        log.info("step %d is trained, in %.2f s, %.2f s of them without groups", step + 1, step_s, waited_s)
        self.metrics = metrics | fleet_metrics | evaluation
        if self.recorder is not None:
            self.recorder.step(step, step_s, waited_s, stats, self.metrics)
        give_back_heap()

    def enter(self, state: str, step: int | None = None) -> None:
        """This process does something else now; the first rank tells the hub too, if others have to wait for it meanwhile."""
        self.trace.enter(state, **({} if step is None else {"step": step}))
        told = _STATES.get(state, "trains")
        if self.group.is_lead and told != self.told:
            self.told = told
            self.mailbox.send("hub", TrainerState(told))

    def checkpoint_if_due(self) -> None:
        """Begin a checkpoint every `checkpoint_steps`, or after `CHECKPOINT_PERIOD_S`, and where the hub asks for one.

        In memory the state is copied more often.
        """
        if self.stops_at_collapse:
            is_alarmed = self.recorder is not None and self.recorder.has_collapsed
            self.has_collapsed = bool(self.group.all_reduce_max([float(is_alarmed)])[0])  # rank 0 alone judges
        every = self.recipe.checkpoint_steps
        is_late = 0.0
        if self.recipe.checkpoint.every is None and self.has_state:
            is_late = float(time.monotonic() - self.checkpointed_at >= CHECKPOINT_PERIOD_S)
            is_late = self.group.all_reduce_max([is_late if self.group.is_lead else 0.0])[0]  # rank 0's clock counts
        is_due = every and self.learner.version % every == 0
        if (is_due or is_late or self.checkpoint_after >= self.checkpoints.newest) and not self.has_collapsed:
            self.checkpoint()
        self.checkpoints.check()
        if self.copies is not None and not self.has_collapsed:
            self.copies.after_step()

    @property
    def has_state(self) -> bool:
        """Whether checkpoints are written without a request: emulated devices have nothing to lose."""
        return self.recipe.trainer.engine != "emulated"

    def checkpoint(self) -> None:
        """Copy the state of training, which a thread writes while training goes on."""
        started = self.clock.now()
        self.checkpointed_at = time.monotonic()
        self.enter("checkpoint")
        settings = self.recipe.checkpoint
        best = settings.best
        score = self.metrics.get(best)
        if not isinstance(score, float | int) or settings.is_best_evaluated:
            score = None
            if best and not settings.is_best_evaluated and self.group.is_lead:
                names = ", ".join(sorted(self.metrics))
                say(f"checkpoint.best: this checkpoint has no score, since its step has no '{best}'; it has {names}")
        log.info("checkpoint of step %d begins", self.learner.version)
        self.checkpoints.begin(self.learner.version, self.learner.stage, score)
        self.resumed_at += self.clock.now() - started

    def step_trained(self, step: int) -> StepTrained:
        """The report of a step, with the seconds since the one before; those of a checkpoint are left out."""
        busy_s = self.clock.now() - self.resumed_at - self.waited_s
        self.resumed_at = self.clock.now()
        return StepTrained(step, self.incarnation, busy_s, self.waited_s)

    def next_for_training(self, step: int) -> Batch | AfterLastStep:
        """This rank's share of the next groups, or an evaluation; rows of other tasks get their columns meanwhile."""
        while isinstance(found := self.next_batch(step), Batch) and found.task != TRAIN:
            self.enter(found.task, step)
            self.stream.put(found, {"ref_logprobs": self.learner.logprobs(found)})
        return found

    def last_evaluations(self) -> dict[str, float]:
        """After the last step: wait for the evaluations that are due; the metrics of the last one."""
        metrics: dict[str, float] = {}
        try:
            while isinstance(found := self.next_for_training(self.recipe.run.steps), EvaluationResult):
                self.record_evaluation(found.metrics)
                metrics |= found.metrics
        except RunStopped:
            say("the run ends before its last evaluation is complete")
        return metrics

    def record_evaluation(self, metrics: dict[str, float]) -> None:
        """Show an evaluation that is complete, and score the checkpoint of its version with it."""
        if metrics and self.recorder is not None:
            self.recorder.evaluation(metrics)
            self.checkpoints.score(metrics)

    def next_batch(self, step: int) -> Batch | AfterLastStep:
        """This rank's share of the next batch, or an evaluation after the last step.

        Raises `RunStopped` on all ranks when the hub ends the run.
        """
        started = self.clock.now()
        self.enter("wait", step)
        batch = self.stream.next()
        self.waited_s += self.clock.now() - started
        return batch

    def publish(self) -> dict[str, Value]:
        """Publish the present weights to the relays; returns after the copy."""
        started = self.clock.now()
        self.enter("publish")
        self.learner.publish()
        return {"weights/push_s": self.clock.now() - started, "weights/bytes": self.learner.num_bytes}

    def finish(self, *, is_behind: bool = False) -> None:
        """Write the last checkpoint, send the hub the facts for the summary, and close everything.

        is_behind: the run ends while steps are trained again; the weights are of an earlier step, so they are not exported.
        """
        self.stream.close()
        if self.copies is not None:
            self.copies.end()
        is_due = self.has_state or self.recipe.checkpoint.every or self.checkpoint_after >= self.checkpoints.newest
        is_due = is_due and not self.has_collapsed
        if is_due and self.learner.version > self.checkpoints.newest:
            self.checkpoint()
        if is_behind and self.group.is_lead and self.num_counted:
            say(behind_line(self.learner.version, self.checkpoints.newest, self.num_counted))
        self.checkpoints.close(self.group)  # an end before the seal would be one without a checkpoint
        if self.copies is not None and self.has_collapsed:
            self.copies.forget()  # else the supervisors would leave them to the next start
        if self.group.is_lead:
            tell("training has ended; the model is being written")
        is_trained = self.learner.version > 0  # else the model would be the one that the run began with
        export = self.learner.export() if is_trained and not is_behind and not self.has_collapsed else ""
        self.learner.close()
        self.trace.close()
        self.storage.close()
        if self.recorder is not None:
            saved = {*self.checkpoints.folder.whole(), self.learner.version}
            self.recorder.finish(export if export and Path(export).exists() else "", saved)
        self.mailbox.close()


def run(fleet: Fleet, recipe: Recipe) -> None:
    """The trainer's process."""
    # Said in so many words, the number binds MKL too, which else takes fewer threads for small matrices: a replay does the same.
    torch.set_num_threads(torch.get_num_threads())
    try:
        trainer = Trainer(fleet, recipe)
    except RunStopped as end:
        say(f"the run ends before the trainer has loaded its weights ({end}); run.resume=auto continues it")
        return
    trainer.run()
