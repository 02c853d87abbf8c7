"""Evaluations: the rules by which events change them.

One evaluation is under way at a time, on one version. Each of its samples ends once, with a score or as failed, and never
enters the queue.
"""

import json

from ...comm.messages.base import GroupId
from ...comm.messages.leases import SampleScored
from . import events as ev
from .evaluation_metrics import evaluation_metrics
from .records import EvaluationLog, Group, Row, RowStatus

EVALUATIONS_FILE = "evaluations.jsonl"
"""The responses of evaluations in the run folder; the journal beside it has their scores."""


def response_line(version: int, name: str, row: int, event: ev.Evaluated, text: str) -> bytes:
    """The line of that file about a sample: of row number `row` of the file `name`."""
    reward = None if event.failure else event.reward
    line = {"version": version, "name": name, "row": row, "sample": event.row.sample, "reward": reward}
    rest = {"tokens": event.num_tokens, "truncated": event.is_truncated, "failure": event.failure, "text": text}
    return json.dumps(line | rest).encode() + b"\n"


def score_of(scored: SampleScored) -> ev.Evaluated:
    """The end of a sample that a rollout has finished; one without a reward has no score."""
    return ev.Evaluated(
        row=scored.row, reward=scored.reward or 0.0, num_tokens=scored.num_tokens, is_truncated=scored.is_truncated,
        failure=scored.failure or ("no reward" if scored.reward is None else ""), num_drawn=scored.num_drawn,
    )  # fmt: skip


def begin_evaluation(event: ev.EvaluationBegun, log: EvaluationLog) -> None:
    """An evaluation that no rollout began makes room for another one, on a version that there is."""
    assert event.number == log.num_begun, f"evaluation {event.number} after {log.num_begun}"
    assert not log.open or log.is_untouched, f"evaluation {log.num_begun - 1} is under way"
    log.asked -= log.open
    log.begun = event
    log.num_begun = log.num_begun + 1
    log.scores = {}
    ids = (GroupId(event.number, index, is_evaluation=True) for index in range(sum(event.num_prompts.values())))
    log.groups = {id_: Group(id_, index, _rows(event.samples)) for index, id_ in enumerate(ids)}
    log.asked += log.open


def end_sample(event: ev.Evaluated, log: EvaluationLog) -> None:
    """A sample has its score, or none for a reason; with the last one the evaluation is complete."""
    row = log.groups[event.row.group].rows[event.row.sample]
    assert row.status in (RowStatus.WANTED, RowStatus.LEASED), f"sample {event.row} is {row.status.name}"
    log.num_leased -= row.status is RowStatus.LEASED
    row.status = RowStatus.FAILED if event.failure else RowStatus.READY
    log.evaluated += not event.failure
    log.failed += bool(event.failure)
    log.scores[event.row] = event
    if log.begun is not None and len(log.scores) == sum(log.begun.num_prompts.values()) * log.begun.samples:
        log.results.append(evaluation_metrics(log.begun, log.scores))
        log.groups = {}


def _rows(samples: int) -> list[Row]:
    return [Row() for _ in range(samples)]
