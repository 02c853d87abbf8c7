"""Penalties that change a reward before its advantage."""

import numpy as np
import pytest

from headrace.trainer.algorithms.reward_shaping import kl_to_go, overlong_penalty


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 0), (12, 0), (13, 0.25), (14, 0.5), (16, 1), (20, 1)])
def test_the_overlong_penalty_grows_over_the_buffer(num_tokens: int, expected: float):
    assert overlong_penalty(num_tokens, max_new_tokens=16, buffer=4, penalty=1.0) == expected
    assert overlong_penalty(num_tokens, max_new_tokens=16, buffer=4, penalty=0.5) == expected / 2


def test_without_a_buffer_there_is_no_penalty():
    assert overlong_penalty(16, max_new_tokens=16, buffer=0, penalty=1.0) == 0


def test_a_token_carries_the_kl_penalty_of_the_tokens_from_it_on():
    kl = np.array([0.5, -0.25, 1.0])
    assert kl_to_go(kl).tolist() == [kl[t:].sum() for t in range(3)]
