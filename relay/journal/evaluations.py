"""Evaluations: the rules by which events change them, and the metrics of their scores.

One evaluation is under way at a time, on one version. Each of its samples ends once, with a score or as failed, and never
enters the queue.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import comb

from ...comm.messages.base import GroupId, RowId
from . import events as ev
from .records import EvaluationLog, Group, Row, RowStatus

EVALUATIONS_FILE = "evaluations.jsonl"
"""The responses of evaluations in the run folder; the journal beside it has their scores."""


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


def evaluation_metrics(begun: ev.EvaluationBegun, scores: Mapping[RowId, ev.Evaluated]) -> dict[str, float]:
    """`eval/NAME/...` of each file of prompts, and `eval/version`.

    avg@k is the mean over prompts of the mean reward of a prompt's samples; a sample without a score counts in `missing`
    alone, and a prompt with fewer than k scores does not count in pass@k.
    """
    metrics = {"eval/version": float(begun.version)}
    first = 0
    for name, num_prompts in begun.num_prompts.items():
        by_prompt = [
            [
                score
                for sample in range(begun.samples)
                if not (score := scores[GroupId(begun.number, index, is_evaluation=True).row(sample)]).failure
            ]
            for index in range(first, first + num_prompts)
        ]
        found = _metrics_of_file(begun, [each for each in by_prompt if each])
        num_scores = sum(map(len, by_prompt))
        metrics |= {f"eval/{name}/{key}": value for key, value in found}
        metrics[f"eval/{name}/missing"] = float(num_prompts * begun.samples - num_scores)
        first += num_prompts
    return metrics


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that one of k samples is right, estimated from n samples of which c are: 1 - C(n - c, k) / C(n, k).

    Unbiased for n >= k (Chen et al. 2021, arXiv 2107.03374, equation 1).
    """
    return 1 - comb(num_samples - num_right, k) / comb(num_samples, k)


def pass_sizes(samples: int) -> list[int]:
    """The k of pass@k: the powers of two below the number of samples, and that number."""
    return [1 << power for power in range((samples - 1).bit_length())] + [samples]


def _metrics_of_file(
    begun: ev.EvaluationBegun, by_prompt: Sequence[Sequence[ev.Evaluated]]
) -> Iterator[tuple[str, float]]:
    """Metrics of the prompts that have scores; none without any."""
    if not by_prompt:
        return
    yield f"avg@{begun.samples}", _mean(_mean(score.reward for score in scores) for scores in by_prompt)
    right = [(len(scores), sum(score.reward >= begun.threshold for score in scores)) for scores in by_prompt]
    for k in pass_sizes(begun.samples):
        if chances := [pass_at_k(num, num_right, k) for num, num_right in right if num >= k]:
            yield f"pass@{k}", _mean(chances)
    scores = [score for scores in by_prompt for score in scores]
    yield "response_length/mean", _mean(score.num_tokens for score in scores)
    yield "response_length/clip_ratio", _mean(score.is_truncated for score in scores)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _rows(samples: int) -> list[Row]:
    return [Row() for _ in range(samples)]
