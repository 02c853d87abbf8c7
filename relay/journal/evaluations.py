"""Evaluations: their samples, which never enter the queue, and the metrics of their scores.

Invariant, in samples, after every event:  asked = evaluated + failed + open

One evaluation is under way at a time, on one version. Each of its samples ends once, with a score or as failed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb

from ...comm.messages.base import GroupId, RowId
from . import events as ev
from .records import Group, Row, RowStatus


@dataclass(slots=True)
class EvaluationLog:
    """A part of the fold: the evaluation under way, or the last one, and the metrics of all that are complete, in order."""

    begun: ev.EvaluationBegun | None = None
    groups: dict[GroupId, Group] = field(default_factory=dict)
    scores: dict[RowId, ev.Evaluated] = field(default_factory=dict)
    num_begun: int = 0
    num_leased: int = 0
    """Samples that are being generated."""
    asked: int = 0
    evaluated: int = 0
    failed: int = 0
    results: list[dict[str, float]] = field(default_factory=list)

    @property
    def open(self) -> int:
        """Samples without an end."""
        return sum(len(group.samples(RowStatus.WANTED, RowStatus.LEASED)) for group in self.groups.values())

    @property
    def is_balanced(self) -> bool:
        return self.asked == self.evaluated + self.failed + self.open

    @property
    def account(self) -> dict[str, int | bool]:
        """The invariant's numbers, for print and file."""
        counts = {"asked": self.asked, "evaluated": self.evaluated, "failed": self.failed, "open": self.open}
        return counts | {"holds": self.is_balanced}

    @property
    def is_untouched(self) -> bool:
        """Whether no sample has ended or is being generated."""
        return not self.scores and not self.num_leased

    def is_after(self, due: int) -> bool:
        """Whether the evaluation that was due at this version has begun."""
        return self.begun is not None and self.begun.due >= due

    def wanted(self) -> list[Group]:
        """The groups with samples that no rollout has."""
        return [group for group in self.groups.values() if group.samples(RowStatus.WANTED)]

    def begin(self, event: ev.EvaluationBegun) -> None:
        """An evaluation that no rollout began makes room for another one, on a version that there is."""
        assert event.number == self.num_begun, f"evaluation {event.number} after {self.num_begun}"
        assert not self.open or self.is_untouched, f"evaluation {self.num_begun - 1} is under way"
        self.asked -= self.open
        self.begun, self.num_begun = event, self.num_begun + 1
        self.scores = {}
        ids = (GroupId.of_evaluation(event.number, index) for index in range(sum(event.num_prompts.values())))
        self.groups = {id_: Group(id_, index, _rows(event.samples)) for index, id_ in enumerate(ids)}
        self.asked += self.open

    def end_sample(self, event: ev.Evaluated) -> None:
        """A sample has its score, or none for a reason; with the last one the evaluation is complete."""
        row = self.groups[event.row.group].rows[event.row.sample]
        assert row.status in (RowStatus.WANTED, RowStatus.LEASED), f"sample {event.row} is {row.status.name}"
        self.num_leased -= row.status is RowStatus.LEASED
        row.status = RowStatus.FAILED if event.failure else RowStatus.READY
        self.evaluated += not event.failure
        self.failed += bool(event.failure)
        self.scores[event.row] = event
        if self.begun is not None and len(self.scores) == sum(self.begun.num_prompts.values()) * self.begun.samples:
            self.results.append(evaluation_metrics(self.begun, self.scores))
            self.groups = {}

    def reopen(self) -> None:
        """Samples that were being generated have lost their holders."""
        self.num_leased = 0
        for group in self.groups.values():
            for sample in group.samples(RowStatus.LEASED):
                group.rows[sample].reset()


def evaluation_metrics(begun: ev.EvaluationBegun, scores: Mapping[RowId, ev.Evaluated]) -> dict[str, float]:
    """`eval/NAME/...` of each file of prompts, and `eval/version`.

    avg@k is the mean over prompts of the mean reward of a prompt's samples; a sample without a score counts in `missing`
    alone, and a prompt with fewer than k scores does not count in pass@k.
    """
    metrics, first = {"eval/version": float(begun.version)}, 0
    for name, num_prompts in begun.num_prompts.items():
        by_prompt = [
            [
                score
                for sample in range(begun.samples)
                if not (score := scores[GroupId.of_evaluation(begun.number, index).row(sample)]).failure
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
