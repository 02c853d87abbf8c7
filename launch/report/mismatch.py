"""How far two engines' log-probabilities of the same tokens are apart: statistics by position, the worst tokens, the verdict."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

GENERATOR = "generator"
TRAINER = "trainer"
TRANSFORMERS = "transformers"
"""The engines, in the order of the table."""

HEALTHY_KL = 2e-4
"""Largest healthy KL(generator, trainer) of a dense policy in bfloat16: what tinker-cookbook 0.6.1 reports of healthy runs
(recipes/rl_numerics_check/README.md: "around 0.0002" for Qwen3.6-27B)."""
HEALTHY_KL_OF_EXPERTS = 2e-3
"""The same with experts ("0.001-0.002" for Qwen3.6-35B-A3B): a rounding may send a token to other experts."""
HEALTHY_KL_OF_FLOAT32 = 1e-8
"""That of any policy in float32: a root mean square of 1.4e-4 in log p. Rounding gives 1e-5 at most; products in bfloat16 give 1e-2."""
FAR = 0.1
"""|difference of log p| beyond which a token counts as far: its ratio has left [.9, 1.1], half of the usual clip range."""
_ENDS = (8, 32, 128, 512, 2048, 8192)
"""Ends of the ranges of positions; the last range has no end."""


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A response that the generator drew, with the log-probability of each of its tokens by every engine, at one temperature."""

    prompt: int
    """The number of its prompt, from 0."""
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: Mapping[str, np.ndarray]
    """By engine: float64 [R]."""


class Mismatch(NamedTuple):
    """Two engines over the tokens of some positions."""

    num_tokens: int
    mean_difference: float
    """Mean |log p - log q|."""
    kl: float
    """KL(p, q) of the tokens' distributions, estimated from tokens that p drew: the mean of r - 1 - log r with r = q / p, which is
    never negative (Schulman, "Approximating KL divergence", 2020)."""
    kl_error: float
    """Its standard error, as if tokens were independent."""
    far_share: float
    """Share of tokens beyond `FAR`."""

    @classmethod
    def of(cls, first: np.ndarray, second: np.ndarray) -> "Mismatch":
        """first, second: log-probabilities, float64 [T] with T > 0, of tokens that the first engine drew."""
        difference = second - first
        terms = np.expm1(difference) - difference
        size = np.abs(difference)
        return cls(
            num_tokens=len(difference),
            mean_difference=float(size.mean()),
            kl=float(terms.mean()),
            kl_error=float(terms.std() / len(terms) ** 0.5),
            far_share=float((size > FAR).mean()),
        )


class WorstToken(NamedTuple):
    """A token whose log-probabilities by generator and trainer are far apart; `position` counts from 0 in the response."""

    prompt: int
    position: int
    token_id: int
    logprobs: Mapping[str, float]


class Verdict(NamedTuple):
    """Whether generator and trainer compute the same policy, up to a healthy rounding."""

    is_healthy: bool
    text: str


def mismatches(samples: Sequence[ScoredSample]) -> Iterator[tuple[tuple[str, str], str, Mismatch]]:
    """For each pair of engines: the pair, a range of positions, and the mismatch there, that of all positions first."""
    if not samples:
        return
    positions = np.concatenate([np.arange(len(sample.token_ids)) for sample in samples])
    for pair in combinations(samples[0].logprobs, 2):
        first, second = (np.concatenate([sample.logprobs[engine] for sample in samples]) for engine in pair)
        yield pair, "all", Mismatch.of(first, second)
        for name, is_within in _ranges(positions):
            yield pair, name, Mismatch.of(first[is_within], second[is_within])


def worst_tokens(samples: Sequence[ScoredSample], most: int) -> list[WorstToken]:
    """The tokens on which generator and trainer differ most, at most so many, none where they are equal."""
    found = [
        (abs(difference), WorstToken(sample.prompt, position, sample.token_ids[position], _at(sample, position)))
        for sample in samples
        for position, difference in enumerate(sample.logprobs[TRAINER] - sample.logprobs[GENERATOR])
        if difference
    ]
    return [token for _, token in sorted(found, key=lambda item: -item[0])[:most]]


def healthy_kl(dtype: str, *, has_experts: bool) -> float:
    """The largest healthy KL(generator, trainer) of a policy in a compute type."""
    if dtype == "float32":
        return HEALTHY_KL_OF_FLOAT32
    return HEALTHY_KL_OF_EXPERTS if has_experts else HEALTHY_KL


def verdict(mismatch: Mismatch, bound: float, cure: str) -> Verdict:
    """mismatch: of generator and trainer over all positions. cure: the setting that helps."""
    if mismatch.mean_difference == 0:
        return Verdict(True, "healthy: generator and trainer are equal bit for bit")
    found = f"KL(generator, trainer) = {mismatch.kl:.1e} +- {mismatch.kl_error:.0e}"
    source = " (tinker-cookbook, rl_numerics_check)" if bound != HEALTHY_KL_OF_FLOAT32 else " (float32)"
    if mismatch.kl <= bound:
        return Verdict(True, f"healthy: {found}, at most {bound:g}{source}")
    return Verdict(False, f"NOT HEALTHY: {found}, above {bound:g}{source}; {cure}")


def _ranges(positions: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Names of the ranges that have tokens, counted from 1, and which tokens are in each."""
    start = 0
    for end in (*_ENDS, None):
        is_within = (positions >= start) & (positions < end) if end else positions >= start
        if is_within.any():
            yield f"{start + 1}-{end}" if end else f"{start + 1}-", is_within
        start = end or start


def _at(sample: ScoredSample, position: int) -> dict[str, float]:
    return {engine: float(logprobs[position]) for engine, logprobs in sample.logprobs.items()}
