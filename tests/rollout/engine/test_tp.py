"""The engine on two ranks of one replica, as threads over Gloo."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.policies import LLAMA_LINE, random_prompts, tiny_policy

from headrace.comm.errors import SettingError
from headrace.rollout import Engine, SamplingParams

TIMEOUT = timedelta(seconds=60)


def on_two_ranks(path, prompts, params, **options):
    """Completions of each of two ranks (threads) of one replica."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]

    def rank(index):
        group: Any = dist.ProcessGroupGloo(store, index, 2, TIMEOUT)
        engine = Engine(path, tp_group=group, max_running=9, **options)
        completions = engine.generate(prompts, params)
        engine.check()
        return completions

    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(rank, range(2)))


@pytest.mark.parametrize("family", LLAMA_LINE)
def test_two_ranks_generate_what_one_generates(tmp_path, family):
    path = tiny_policy(tmp_path, family)
    prompts, params = random_prompts(12, longest=100), SamplingParams(max_new_tokens=30, n=2)
    alone = Engine(path, max_running=9).generate(prompts, params)
    for completions in on_two_ranks(path, prompts, params):
        assert [c.token_ids for c in completions] == [c.token_ids for c in alone]
        for completion, expected in zip(completions, alone, strict=True):
            assert torch.tensor(completion.logprobs).allclose(torch.tensor(expected.logprobs), atol=1e-4)


def test_a_policy_that_cannot_be_split_is_refused_by_name(tmp_path):
    prompts, params = [[5, 6]], SamplingParams()
    with pytest.raises(SettingError, match=r"rollout\.tp: 2 ranks do not divide the policy's num_key_value_heads of 1"):
        on_two_ranks(tiny_policy(tmp_path, num_key_value_heads=1), prompts, params)
    with pytest.raises(SettingError, match=r"rollout\.tp: model type 'gemma2' runs on one rank only"):
        on_two_ranks(tiny_policy(tmp_path, "gemma2"), prompts, params)
    with pytest.raises(SettingError, match=r"rollout\.tp: exact mode runs on one rank only"):
        on_two_ranks(tiny_policy(tmp_path), prompts, params, exact=True)
