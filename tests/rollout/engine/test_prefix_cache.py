"""The prefix cache in an engine: equal bits in exact mode, one version, the same trajectories as without it."""

import pytest
import torch
from support.policies import STORIES, random_prompts, tiny_policy

from headrace.rollout import Engine, SamplingParams
from headrace.rollout.engine.attention.cpu import _runs
from headrace.trainer.policy.model import load_policy

SYSTEM = [5 + (7 * i) % 90 for i in range(70)]


def turns(engine, count=3):
    """Conversations of several turns that begin with one system prompt."""
    chats, completions = [[*SYSTEM, *prompt] for prompt in random_prompts(5, longest=60)], []
    for turn in range(count):
        for index, chat in enumerate(chats):
            engine.add_group(chat, SamplingParams(max_new_tokens=25, ignore_eos=True), [10 * turn + index])
        found = {}
        while not engine.idle:
            found |= {c.trajectory_id % 10: c for c in engine.step()}
            engine.check()
        completions += [found[index] for index in range(len(chats))]
        chats = [[*found[index].prompt_ids, *found[index].token_ids, 9, 8, 7] for index in range(len(chats))]
    return completions


def trained_logprobs(policy, completion):
    tokens = torch.tensor(completion.prompt_ids + completion.token_ids)
    with torch.no_grad():
        hidden = policy.forward_packed(tokens[:-1], torch.tensor([0, len(tokens) - 1]))
        return policy.token_logprobs(hidden, tokens[1:])[0][len(completion.prompt_ids) - 1 :]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_that_are_found_again_have_the_bits_of_a_prefill_in_exact_mode(dtype):
    engine, policy = Engine(STORIES, dtype, exact=True, max_running=3), load_policy(STORIES, dtype, exact=True)
    for completion in turns(engine):
        assert torch.equal(torch.tensor(completion.logprobs), trained_logprobs(policy, completion))
    assert engine.scheduler.prefixes.num_found > engine.scheduler.num_prefilled


@pytest.mark.parametrize("attention", ["pool", "gather"])
def test_trajectories_are_those_of_an_engine_without_the_cache(llama, attention):
    tight = 16 * 64 * 512 / 1e9
    engine = Engine(llama, attention=attention, max_running=4, kv_gb=tight)
    plain = Engine(llama, attention=attention, max_running=4, kv_gb=tight, prefix_cache=False)
    expected = turns(plain)
    for ours, theirs in zip(turns(engine), expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert torch.tensor(ours.logprobs).allclose(torch.tensor(theirs.logprobs), atol=1e-5)
    assert engine.scheduler.prefixes.num_found > 0 == plain.scheduler.prefixes.num_found


def test_a_page_is_found_only_behind_the_tokens_that_it_was_computed_behind(llama):
    engine = Engine(llama, max_running=2)
    size = engine.scheduler.pool.page_size
    first, second, third, fourth = ([start + i % 20 for i in range(size)] for start in (5, 25, 45, 65))
    for prompt in ([*first, *second, 9], [*third, *fourth, 9], [*first, *fourth, 9]):
        engine.generate([prompt], SamplingParams(max_new_tokens=1))
    assert engine.scheduler.prefixes.num_found == size, "of the last prompt, its first page"


def test_equal_prompts_of_a_list_are_prefilled_once(llama):
    prompts = [prompt for prompt in random_prompts(3, longest=200) for _ in range(8)]
    one_by_one, by_group = Engine(llama, max_running=4), Engine(llama, max_running=4)
    one_by_one.generate(prompts, SamplingParams(max_new_tokens=9))
    by_group.generate(prompts[::8], SamplingParams(max_new_tokens=9, n=8))
    assert (
        one_by_one.scheduler.num_prefilled == by_group.scheduler.num_prefilled == sum(len(p) - 1 for p in prompts[::8])
    )


def overwrite(engine, path):
    with torch.no_grad():
        for name, weight in load_policy(path).weights().items():
            engine.policy.weights()[name].copy_(weight)
    engine.weights_changed()


@pytest.mark.parametrize("recomputes", [True, False])
def test_no_page_is_found_after_the_weights_changed(llama, tmp_path, recomputes):
    """Without `recompute`, the trajectories under way keep keys and values of both versions, which no other one may find."""
    params, chat = SamplingParams(max_new_tokens=70, temperature=0, ignore_eos=True), SYSTEM
    engine = Engine(load_policy(llama))
    for trajectory_id in range(3):
        engine.add_group([*chat, trajectory_id], params, [trajectory_id])
        engine.step()
    if recomputes:
        engine.recompute()
    other = tiny_policy(tmp_path, seed=1)
    overwrite(engine, other)
    mixed = []
    while not engine.idle:
        mixed += engine.step()
    follow_up = [*mixed[0].prompt_ids, *mixed[0].token_ids]
    prompts = [chat + [3], follow_up, chat + [3]]
    for found, expected in zip(engine.generate(prompts, params), Engine(other).generate(prompts, params), strict=True):
        assert found.token_ids == expected.token_ids
        assert torch.tensor(found.logprobs).allclose(torch.tensor(expected.logprobs), atol=1e-5)


def test_an_imported_cache_is_not_found(llama):
    here, there = Engine(llama), Engine(llama)
    params = SamplingParams(max_new_tokens=90, ignore_eos=True)
    here.add_group([*SYSTEM, 4], params, [1])
    for _ in range(70):
        here.step()
    there.import_sequences(here.export_sequences([1], with_cache=True))
    there.generate([[*SYSTEM, 6]], SamplingParams(max_new_tokens=2))
    assert there.scheduler.prefixes.num_found == 0
    here.generate([[*SYSTEM, 6]], SamplingParams(max_new_tokens=2))
    assert here.scheduler.prefixes.num_found == 64, "the pages that the trajectory left behind are its own engine's"


def test_shared_pages_are_cut_where_the_numbers_of_owners_differ():
    owners = torch.tensor([2] * 48 + [0] * 3 + [32] * 2).numpy()
    assert _runs(owners) == [(0, 51), (51, 53)]
    assert _runs(owners[:3]) == [(0, 3)]
    assert sum(stop - start for start, stop in _runs(owners)) == len(owners)
