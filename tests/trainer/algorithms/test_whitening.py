"""Whitening gives all tokens with loss of a step, on all ranks, a mean of 0 and a variance of 1."""

import threading

import numpy as np
import pytest

from headrace.trainer.algorithms.whitening import whitened

RNG = np.random.default_rng(5)
ADVANTAGES = [RNG.normal(2, 3, n) for n in (4, 7, 2, 5)]
MASKS = [(RNG.random(len(a)) > 0.2).astype(np.uint8) for a in ADVANTAGES]


def alone(values: list[float]) -> list[float]:
    return values


def test_tokens_with_loss_follow_the_formula():
    kept = np.concatenate([a[m == 1] for a, m in zip(ADVANTAGES, MASKS, strict=True)])
    expected = [(a - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8) for a in ADVANTAGES]
    assert np.concatenate(whitened(ADVANTAGES, MASKS, alone)) == pytest.approx(np.concatenate(expected), abs=1e-12)


def test_two_ranks_find_the_numbers_of_one():
    barrier, parts = threading.Barrier(2, timeout=10), [[0.0], [0.0]]
    found: list[list[np.ndarray]] = [[], []]

    def rank(number: int) -> None:
        def add(values: list[float]) -> list[float]:
            parts[number] = values
            barrier.wait()
            total = [float(sum(pair)) for pair in zip(*parts, strict=True)]
            barrier.wait()
            return total

        own = slice(3 * number, 3 * number + 3)
        found[number] = whitened(ADVANTAGES[own], MASKS[own], add)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    expected = np.concatenate(whitened(ADVANTAGES, MASKS, alone))
    assert np.concatenate(found[0] + found[1]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3])
def test_equal_advantages_become_exact_zeros(value: float):
    found = whitened([np.full(3, value), np.full(5, value)], [np.ones(3), np.ones(5)], alone)
    assert not np.concatenate(found).any()


def test_a_step_without_loss_has_no_advantage():
    assert not np.concatenate(whitened([np.ones(3)], [np.zeros(3)], alone)).any()
