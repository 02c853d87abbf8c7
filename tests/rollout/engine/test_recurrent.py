"""Recurrent states beside pages: their places, what a prefix finds, steps that run twice, and their memory."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.policies import random_prompts, tiny_policy

from headrace.comm.errors import SettingError
from headrace.rollout import Engine, SamplingParams
from headrace.rollout.engine.memory import AvailableMemory, plan_cache, state_bytes
from headrace.rollout.engine.recurrent.state_pool import StatePool
from headrace.trainer.policy.model import load_policy


@pytest.fixture
def path(tmp_path):
    return tiny_policy(tmp_path, "qwen3_5_text")


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=60))
@settings(max_examples=200, deadline=None)
def test_a_place_has_one_owner_and_a_kept_state_is_that_of_its_tokens(operations):
    """Each place holds a number for its state; a copy carries it on, as the tensors would."""
    pool = StatePool(6)
    held: dict[int, int] = {0: 0}
    owned: dict[int, int] = {}
    known: dict[bytes, int] = {}
    for kind, value in operations:
        place = list(owned)[value % len(owned)] if owned else 0
        digest = bytes([value])
        if kind in (0, 1) and pool.has_room(1):
            taken = pool.take(place if kind else None)
            assert taken not in owned
            for source, target in pool.take_copies():
                held[target] = held[source]
            if kind == 0:
                held[taken] = 100 + value
            owned[taken] = held[taken]
        elif kind == 2 and place:
            if not pool.holds(digest):
                known[digest] = held[place]
            pool.keep(place, digest)
            del owned[place]
        elif kind == 3 and place:
            pool.give_back([place, 0])
            del owned[place]
        elif kind == 4:
            pool.forget()
        assert all(held[place] == state for place, state in owned.items())
        assert all(held[pool.find(digest) or 0] == known[digest] for digest in known if pool.holds(digest))
        pool.check(owned)


def test_of_kept_states_the_one_that_was_not_found_for_longest_goes_first():
    pool = StatePool(3)
    places = [pool.take(None) for _ in range(3)]
    for place, digest in zip(places, (b"a", b"b", b"c"), strict=True):
        pool.keep(place, digest)
    assert pool.find(b"a") == places[0] and pool.num_free == 3
    assert pool.take() == places[1] and not pool.holds(b"b") and pool.holds(b"a")


def turns(engine: Engine, count: int = 4):
    """Conversations of several turns that begin with one text, each turn a new prompt."""
    system = [5 + (7 * i) % 90 for i in range(70)]
    chats, completions = [[*system, *prompt] for prompt in random_prompts(3, longest=20)], []
    for _ in range(count):
        found = engine.generate(chats, SamplingParams(max_new_tokens=15, ignore_eos=True))
        engine.check()
        completions += found
        chats = [[*done.prompt_ids, *done.token_ids, 9, 8, 7] for done in found]
    return completions


def test_a_prefix_is_found_up_to_its_last_state_and_gives_the_same_trajectories(path):
    engine, plain = (
        Engine(path, max_running=3, page_size=8),
        Engine(path, max_running=3, page_size=8, prefix_cache=False),
    )
    for ours, theirs in zip(turns(engine), turns(plain), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert torch.tensor(ours.logprobs).allclose(torch.tensor(theirs.logprobs), atol=1e-5)
    # The last full page of a prompt, or of its response, is found; what is prefilled again is less than two pages a turn.
    assert engine.scheduler.prefixes.num_found > 2 * engine.scheduler.num_prefilled
    assert plain.scheduler.prefixes.num_found == 0


def test_the_second_prompt_behind_a_text_keeps_its_state_for_the_third(path):
    engine = Engine(path, max_running=2, page_size=8)
    text = [5 + (7 * i) % 90 for i in range(40)]
    found = []
    for tail in ([9] * 20, [10] * 20, [11] * 20):
        engine.generate([[*text, *tail]], SamplingParams(max_new_tokens=1))
        found.append(engine.scheduler.prefixes.num_found)
    assert found == [0, 0, 40]


def test_a_step_that_runs_twice_leaves_the_state_that_it_leaves_once(path):
    """As the warm-up of a captured graph, or a step behind a stop whose token is drawn again."""
    once, twice = Engine(path, max_running=4), Engine(path, max_running=4)
    decode = twice.runner.decode
    twice.runner.decode = lambda batch: (decode(batch), decode(batch))[1]
    prompts, params = random_prompts(5, longest=60), SamplingParams(max_new_tokens=30, n=2, ignore_eos=True)
    assert [c.token_ids for c in once.generate(prompts, params)] == [
        c.token_ids for c in twice.generate(prompts, params)
    ]


def test_a_row_and_a_group_use_the_two_places_of_the_numbers_of_their_tokens(path):
    engine = Engine(path, max_running=4)
    engine.add_group([5, 6, 7, 8], SamplingParams(max_new_tokens=9, ignore_eos=True), range(3))
    engine.step()
    states = engine.states
    assert states is not None
    layer = next(iter(states.matrices))
    before = states.matrices[layer].clone()
    rows = engine.batch.states.copy()
    assert len({*rows.flatten().tolist(), 0}) == 7
    engine.step()
    changed = {place for place in range(len(before)) if not torch.equal(before[place], states.matrices[layer][place])}
    parity = engine.batch.positions % 2
    assert changed == {*rows[np.arange(3), parity].tolist()}, "the newest state is at the parity of the rows' tokens"


def test_an_error_leaves_no_state_that_is_not_finite_to_be_found(path):
    engine = Engine(path, max_running=2, page_size=8)
    model: Any = engine.policy.model
    weight = model.model.layers[0].mlp.down_proj.weight
    prompts, params = [[*range(5, 40)], [*range(30, 70)]], SamplingParams(max_new_tokens=20, temperature=0)
    good = [c.token_ids for c in Engine(path, max_running=2, page_size=8).generate(prompts, params)]
    with torch.no_grad():
        kept, weight[0, 0] = weight[0, 0].item(), float("nan")
        assert {c.finish_reason for c in engine.generate(prompts, params)} == {"error"}
        weight[0, 0] = kept
    engine.weights_changed()
    assert [c.token_ids for c in engine.generate(prompts, params)] == good


def test_states_are_part_of_the_cache_s_memory(path):
    policy, bound = load_policy(path), "the free memory"
    page, state = 64 * 2 * 1 * 2 * 16 * 4, state_bytes(policy)
    assert state == 3 * (4 * 12 * 16 * 4 + 3 * (2 * 24 + 64) * 4), "three layers, of fp32"
    plan = plan_cache(policy, 64, 8, None, AvailableMemory(10**9, 10**9, bound))
    assert (plan.num_states, plan.num_pages) == (34, 8 * 4 + 2) and "34 recurrent states" in str(plan)
    scarce = plan_cache(policy, 64, 8, None, AvailableMemory(10**9, 17 * state + 20 * page, bound))
    assert (scarce.num_states, scarce.num_pages) == (17, 20)
    with pytest.raises(SettingError, match=r"GB are needed, with the 17 recurrent states of generator\.max_running=8"):
        plan_cache(policy, 64, 8, None, AvailableMemory(10**9, 17 * state + 3 * page, bound))
    sizes = [plan_cache(policy, 64, n, None, AvailableMemory(10**9, 10**9, bound)).num_states for n in (1, 4, 16)]
    assert all(a < b for a, b in pairwise(sizes))


def test_a_step_behind_a_stop_does_not_advance_a_state_twice(path):
    found = []
    for is_async in (False, True):
        engine = Engine(path, max_running=3)
        engine._is_async = is_async
        params = SamplingParams(max_new_tokens=40, ignore_eos=True, stop=tuple(range(4, 44)), pause_at_stop=True)
        engine.add_group([5, 6, 7, 8], params, range(3))
        ended = {}
        while not engine.idle:
            ended |= {done.trajectory_id: done for done in engine.step()}
            for sequence in list(engine.scheduler.paused):
                assert sequence.num_cached - sequence.num_tokens in ((0, -1) if is_async else (-1,))
                if not engine.resume(sequence.trajectory_id):
                    engine.cancel(sequence.trajectory_id)
        found.append({number: (done.token_ids, done.logprobs) for number, done in ended.items()})
    sync, late = found
    assert sync.keys() == late.keys() and any(len(tokens) > 5 for tokens, _ in sync.values())
    for number, (tokens, logprobs) in sync.items():
        assert late[number][0] == tokens and late[number][1] == pytest.approx(logprobs, abs=1e-5)
