"""Rank 0's record of a run: a line of metrics and the samples of each step, and the facts for the summary."""

import resource
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...comm.clock import Clock, TimeLeft
from ...comm.disk import say, tell
from ...comm.mailbox import Mailbox
from ...comm.messages import LearningAlarm, TrainingDone
from ...comm.recipe import Recipe
from ..alarms.balance import Balance, layout_of
from ..alarms.run_alarms import RunAlarms
from ..checkpoint import CheckpointWriter
from ..step_metrics import StepMetrics
from .console import console_line, evaluation_line, unbeaten_line
from .metrics_log import MetricsLog, Value
from .samples_log import SamplesLog
from .trackers.opened import open_trackers
from .wait_metrics import WaitMeter


class RunRecorder:
    """Rank 0's record of the run: metrics, and the facts for the summary."""

    def __init__(
        self,
        recipe: Recipe,
        mailbox: Mailbox,
        checkpoints: CheckpointWriter,
        clock: Clock,
        *,
        first_step: int,
        open_tokenizer: Callable[[], Any] = lambda: None,
    ) -> None:
        """first_step: the run continues with it. open_tokenizer: gives that of the policy; if it is None, no samples are recorded."""
        run_dir = Path(recipe.run.dir)
        self.mailbox = mailbox
        open_to = partial(open_trackers, recipe, first_step)
        self.log = MetricsLog(run_dir, first_step, clock, recipe.comm.deadline_s, open_to)
        self.num_steps = recipe.run.steps
        self.alarms = RunAlarms(recipe)
        self.has_collapsed = False
        """Whether an alarm of this process ends the run."""
        self.checkpoints = checkpoints
        self.time_left = TimeLeft(self.num_steps)
        self.balance = Balance(layout_of(recipe))
        self.waits = WaitMeter()
        self.next_step = 0
        """The first step that has no line in the log."""
        self.rewards: list[float] = []
        self.num_tokens = 0
        self.evaluated = -1
        """The newest version whose evaluation is in the log."""
        self.best = recipe.checkpoint.best
        self.scores: dict[int, float] = {}
        """The values of `checkpoint.best` by version, if it is a metric of evaluations."""
        for line in self.log.lines():
            self.next_step = line["step"] + 1
            self.alarms.step(line["step"], line)
            self.rewards.append(line["reward/mean"])
            self.num_tokens += round(line["perf/throughput"] * line["timing_s/step"])
            if "eval/version" in line:
                checkpoints.score(line)
                self.note_score(line)
                self.evaluated = max(self.evaluated, int(line["eval/version"]))
        self.samples = SamplesLog(recipe, self.next_step, self.log, open_tokenizer)

    def step(self, step: int, step_s: float, wait_s: float, stats: StepMetrics, metrics: dict[str, Value]) -> None:
        tokens = sum(row.num_tokens for row in stats.rows)
        metrics |= {
            "timing_s/step": step_s,
            "timing_s/wait_data": wait_s,
            "idle/actor": wait_s / step_s,
            "perf/throughput": tokens / step_s,
            "perf/max_memory_allocated_gb": _peak_memory_gb(),
            **self.waits.step(),
        }
        self.rewards.append(stats.mean_reward)
        self.num_tokens += tokens
        metrics |= self.alarms.step(step, metrics)
        self.samples.write(step, stats.shown)  # first, so that no step of the metrics lacks its samples
        self.log.write(step, metrics, stats.histograms(step))
        tell(console_line(step, self.num_steps, metrics, self.time_left.after(step, step_s)))
        self.samples.show(step)
        for told in self.alarms.told(self.checkpoints.newest):
            say(told.line)
            self.mailbox.send("hub", LearningAlarm(told.text, told.ends_run))
            self.has_collapsed |= told.ends_run
        rollout_idle = metrics.get("idle/rollout")
        if advice := self.balance.step(step_s, wait_s, rollout_idle if isinstance(rollout_idle, float) else None):
            say(advice)

    def evaluation(self, metrics: dict[str, float]) -> None:
        """Show an evaluation that is complete; the line of the step in progress has it too."""
        self.log.write_evaluation(metrics)
        tell(evaluation_line(metrics))
        self.note_score(metrics)

    def note_score(self, evaluation: Mapping[str, float]) -> None:
        """Note the value of `checkpoint.best` in an evaluation."""
        if self.best in evaluation:
            self.scores[int(evaluation["eval/version"])] = evaluation[self.best]

    def finish(self, export: str, saved: Collection[int]) -> None:
        """Send the hub the facts for the summary; `saved` are the versions that the run leaves."""
        elapsed_s = self.log.elapsed_s
        num = len(self.rewards)
        facts: dict[str, float | int | str | list[str]] = {"export": export, "time_s": round(elapsed_s, 2)}
        facts["tokens_per_s"] = round(self.num_tokens / max(elapsed_s, 1e-9), 1)
        if tenth := min(max(3, num // 10), num):
            facts["reward_first"] = round(sum(self.rewards[:tenth]) / tenth, 4)
            facts["reward_last"] = round(sum(self.rewards[-tenth:]) / tenth, 4)
        if advice := self.balance.advice():
            facts["advice"] = advice
        if self.alarms.last_collapse:
            facts["alarm"] = self.alarms.last_collapse
        if self.alarms.warnings:
            facts["warnings"] = [*self.alarms.warnings.values()]
        if unbeaten := unbeaten_line(self.best, self.scores, saved):
            facts["best"] = unbeaten
        self.log.close({name: fact for name, fact in facts.items() if isinstance(fact, float | int)})
        self.samples.close()
        self.mailbox.send("hub", TrainingDone(facts))


def _peak_memory_gb() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
