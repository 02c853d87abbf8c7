"""The metrics of an evaluation from its scores: avg@k, pass@k and lengths."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import comb
from typing import TYPE_CHECKING

from ...comm.messages.base import GroupId, RowId

if TYPE_CHECKING:
    from .events import Evaluated, EvaluationBegun


def evaluation_metrics(begun: "EvaluationBegun", scores: "Mapping[RowId, Evaluated]") -> dict[str, float]:
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
    begun: "EvaluationBegun", by_prompt: "Sequence[Sequence[Evaluated]]"
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
