"""Evaluations during training: rollouts that hold the version answer its prompts before those of training.

An evaluation is pinned to the version at which it is due. A rollout takes a share of its prompts and keeps the version until
none are left to take. An idle rollout that is ahead goes back to the version; once no process has the version any more,
samples without a score are missing, and an evaluation without any begins again on the next version.
"""

import math
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from ...comm.disk import AppendFile, say
from ...comm.errors import is_power_of_ten
from ...comm.messages import Lease, LeaseRequest, SampleScored
from ..dataset.rows import MAX_ROW_BYTES, row_problem
from ..journal import events as ev
from ..journal.evaluations import EVALUATIONS_FILE, response_line, score_of
from ..journal.records import RowStatus
from .context import Handler, HubContext

if TYPE_CHECKING:
    from ..queue.evaluation_prompts import EvaluationPrompts
    from ..queue.schedules import Schedule
    from .partial_pool import PartialPool


class Evaluations(Handler):
    """Begins evaluations, gives out their prompts, and accepts a score only from the holder of a sample's present attempt."""

    def __init__(
        self, context: HubContext, prompts: "EvaluationPrompts | None", partials: "PartialPool", schedule: "Schedule"
    ) -> None:
        super().__init__(context)
        self.prompts = prompts
        self._partials = partials
        self.log = self.state.evaluations
        self._schedule = schedule
        self._gone = -1
        """The newest version that a rollout could not go back to."""
        self._failures: Counter[str] = Counter()
        self._file: AppendFile | None = None
        self.routes = {SampleScored: self._on_scored}

    @property
    def is_done(self) -> bool:
        """Whether every evaluation that is due is complete, the one after the last step included."""
        if self.prompts is None:
            return True
        has_version = self.state.version >= self.state.step
        return has_version and not self.log.open and self.log.is_after(self.prompts.due(self.state.version))

    def lease(self, holder: str, request: LeaseRequest, samples_per_prompt: int) -> tuple[int, list[Lease]]:
        """The version to evaluate and a share of its prompts for this holder; no prompts if it gets none now."""
        if self.prompts is None:
            return request.version, []
        if self.log.begun and self.log.open and self.log.begun.num_prompts != self.prompts.num_prompts:
            self.give_up("the prompts of eval.path have changed")
        # A rollout that takes weights under running trajectories may never be idle.
        may_go_back = request.can_continue and not self._schedule.mixes_versions
        if self._is_left_behind(request) and not may_go_back:
            self.give_up("no rollout has its version any more")
        self._begin_if_due(self.prompts, request, may_go_back=may_go_back)
        version = self.log.begun.version if self.log.begun is not None and self.log.open else -1
        goes_back = self._is_left_behind(request) and holder not in self.state.held
        if request.version != version and not goes_back:
            return request.version, []
        return version, self._share(self.prompts, holder, request, samples_per_prompt)

    def give_up(self, reason: str) -> None:
        """No rollout has the version: open samples are missing, or the evaluation begins again if none of them has ended."""
        if self.log.begun is None:
            return
        self._gone = self.log.begun.version
        if self.log.is_untouched:
            return
        for group in self.log.wanted():
            for row_id in group.row_ids(RowStatus.WANTED):
                self._end(ev.Evaluated(row=row_id, failure=reason))

    def _is_left_behind(self, request: LeaseRequest) -> bool:
        """Whether prompts are open that no rollout works on, and this one is beyond their version."""
        begun = self.log.begun
        return begun is not None and not self.log.num_leased and self.log.open > 0 and request.version > begun.version

    def _begin_if_due(self, prompts: "EvaluationPrompts", request: LeaseRequest, *, may_go_back: bool) -> None:
        """Begin on the version that is due, or on the request's if that one is gone or the rollout cannot go back to it."""
        due = prompts.due(self.state.version)
        if self.log.begun is not None and self.log.open:
            can_begin = self.log.is_untouched and self.log.begun.version == self._gone
        else:
            can_begin = not self.log.is_after(due)
        if not can_begin or not 0 <= due <= request.version:
            return
        version = due if may_go_back and due > self._gone else request.version
        begun = ev.EvaluationBegun(
            number=self.log.num_begun, version=version, due=due, num_prompts=prompts.num_prompts,
            samples=prompts.settings.samples, threshold=prompts.settings.threshold,
        )  # fmt: skip
        self.context.commit(begun)

    def _share(
        self, prompts: "EvaluationPrompts", holder: str, request: LeaseRequest, samples_per_prompt: int
    ) -> list[Lease]:
        """An equal part of the prompts that are left, at most as many as the holder has room for."""
        assert self.log.begun is not None
        wanted = self.log.wanted()
        version = self.log.begun.version
        room = max(1, request.num_groups * samples_per_prompt // self.log.begun.samples)
        leases: list[Lease] = []
        num_bytes = 0
        for group in wanted[: min(room, math.ceil(len(wanted) / prompts.num_shares))]:
            samples = group.samples(RowStatus.WANTED)
            attempt = group.next_attempt
            row = prompts.row(group.id)
            if problem := row_problem(row):
                for row_id in group.row_ids(RowStatus.WANTED):
                    self._end(ev.Evaluated(row=row_id, failure=f"its row {problem}"))
                continue
            partials = self._partials.wanted(group) if request.can_continue else {}
            answered = {"version": version, "holder": holder, "request_id": request.request_id}
            self.context.commit(ev.Leased(group=group.id, samples=samples, attempt=attempt, **answered))
            leases.append(Lease(group.id, attempt, samples, msgspec.Raw(row), tuple(partials.values())))
            num_bytes += len(row)
            if num_bytes >= MAX_ROW_BYTES // 2:
                break
        return leases

    def _on_scored(self, sender: str, scored: SampleScored) -> None:
        row = self.state.row(scored.row)
        begun = self.log.begun
        if row is None or row.status is not RowStatus.LEASED or row.attempt != scored.attempt or begun is None:
            return  # the report is repeated, or another rollout has the sample by now
        evaluated = score_of(scored)
        if not evaluated.failure and scored.versions != [begun.version]:
            evaluated = replace(evaluated, failure=f"versions {scored.versions} generated it")
        self._keep_text(begun.version, evaluated, scored.text)
        self._end(evaluated)

    def _keep_text(self, version: int, event: ev.Evaluated, text: str) -> None:
        """A line of the file, before the score counts. A hub that dies in between writes it twice; the last one counts."""
        assert self.prompts is not None
        if self._file is None:
            journal = self.context.journal
            self._file = AppendFile(journal.path.with_name(EVALUATIONS_FILE), journal.deadline_s)
        name, number = self.prompts.place(event.row.group)
        self._file.append(response_line(version, name, number, event, text))

    def _end(self, event: ev.Evaluated) -> None:
        """Print each reason for a missing score the first time and whenever its count is 10, 100, ..."""
        self.context.commit(event)
        if event.failure:
            self._failures[event.failure] += 1
            if is_power_of_ten(count := self._failures[event.failure]):
                say(f"evaluation: {count} x no score: {event.failure}")
