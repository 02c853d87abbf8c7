"""Turns become branches: every drawn token is trained once, behind exactly what the policy had read."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rollout.serving.agents.conversation import AgentConversation, Branch, Turn

TOKEN = st.integers(0, 2)
"""Few tokens, so that prompts begin with others by chance."""


def turn(prompt: Sequence[int], drawn: Sequence[int], version: int = 0) -> Turn:
    return Turn(prompt, drawn, [-1.0 - token for token in drawn], [version] * len(drawn))


@st.composite
def histories(draw: st.DrawFn) -> list[Turn]:
    """Turns of an agent that continues, changes or forgets what came before."""
    turns: list[Turn] = []
    for number in range(draw(st.integers(1, 8))):
        start: list[int] = []
        if turns and draw(st.booleans()):
            before = draw(st.sampled_from(turns))
            start = [*before.prompt_ids, *before.token_ids]
            start = start[: draw(st.integers(0, len(start)))] if draw(st.booleans()) else start
        prompt = [*start, *draw(st.lists(TOKEN, max_size=3))] or [0]
        turns.append(turn(prompt, draw(st.lists(TOKEN, min_size=1, max_size=3)), number))
    return turns


def contexts(branch: Branch) -> list[tuple[list[int], int, float, int]]:
    """(tokens before, token, log-prob, version) of each token of a branch that has a loss."""
    tokens = [*branch.prompt_ids, *branch.response_ids]
    start = len(branch.prompt_ids)
    rows = zip(branch.loss_mask, branch.response_ids, branch.logprobs, branch.versions, strict=True)
    return [
        (tokens[: start + at], token, logprob, version)
        for at, (mask, token, logprob, version) in enumerate(rows)
        if mask
    ]


@given(histories())
def test_each_drawn_token_has_a_loss_once_behind_what_the_policy_had_read(turns: list[Turn]):
    conversation = AgentConversation()
    for each in turns:
        conversation.add(each)
    found = [context for branch in conversation.branches for context in contexts(branch)]
    drawn = [
        ([*each.prompt_ids, *each.token_ids[:at]], *told)
        for each in turns
        for at, told in enumerate(zip(each.token_ids, each.logprobs, each.versions, strict=True))
    ]
    assert sorted(found) == sorted(drawn)
    assert conversation.num_drawn == len(drawn) and conversation.num_turns == len(turns)
    for branch in conversation.branches:
        assert branch.loss_mask[0] == 1
        masked = zip(branch.loss_mask, branch.logprobs, strict=True)
        assert all(logprob == 0 for mask, logprob in masked if not mask)
        assert [*branch.turns[-1].prompt_ids, *branch.turns[-1].token_ids] == branch.prompt_ids + branch.response_ids


@given(histories(), st.data())
def test_turns_that_repeat_a_call_change_nothing(turns: list[Turn], data: st.DataObject):
    once = AgentConversation()
    again = AgentConversation()
    for number, each in enumerate(turns):
        once.add(each, f"call {number}")
        again.add(each, f"call {number}")
        repeated = data.draw(st.integers(0, number))
        again.add(turns[repeated], f"call {repeated}")
    assert again.branches == once.branches and again.num_drawn == once.num_drawn


@given(st.lists(st.tuples(st.lists(TOKEN, max_size=3), st.lists(TOKEN, min_size=1, max_size=3)), min_size=1))
def test_a_chain_is_one_branch_whatever_calls_beside_it_come_between(parts: list[tuple[list[int], list[int]]]):
    """Prompts of another token never begin with those of the chain, and the chain's never with theirs."""
    conversation = AgentConversation()
    tokens = [7]
    for inserted, drawn in parts:
        tokens += inserted
        conversation.add(turn(tokens, drawn))
        conversation.add(turn([8, *inserted], drawn))
        tokens = [*tokens, *drawn]
    (chain,) = (branch for branch in conversation.branches if branch.prompt_ids[0] == 7)
    assert chain.prompt_ids + chain.response_ids == tokens
    assert sum(chain.loss_mask) == sum(len(drawn) for _, drawn in parts)


@given(histories(), st.lists(TOKEN, min_size=1), st.integers(1, 20))
def test_what_is_left_keeps_each_response_within_its_longest_length(turns: list[Turn], prompt: list[int], longest: int):
    conversation = AgentConversation()
    for each in turns:
        conversation.add(each)
    assert conversation.num_after([9, *prompt]) == len(prompt) + 1 + sum(b.num_tokens for b in conversation.branches)
    total = conversation.num_after(prompt)
    before = [len(branch.response_ids) for branch in conversation.branches]
    if (left := conversation.num_left(prompt, longest)) >= 1:
        conversation.add(turn(prompt, [0] * left))
        assert sum(branch.num_tokens for branch in conversation.branches) == total + left
        after = [len(branch.response_ids) for branch in conversation.branches]
        assert [now for now, old in zip(after, [*before, 0], strict=False) if now != old] == [longest]


def test_a_second_branch_has_the_turns_before_it_as_its_prompt():
    conversation = AgentConversation()
    conversation.add(turn([1], [2, 3]))
    conversation.add(turn([1, 2, 3, 4], [5]))
    conversation.add(turn([1, 2, 3, 6], [7]))
    first, second = conversation.branches
    assert (first.prompt_ids, first.response_ids, first.loss_mask) == ([1], [2, 3, 4, 5], [1, 1, 0, 1])
    assert (second.prompt_ids, second.response_ids, second.loss_mask) == ([1, 2, 3, 6], [7], [1])


def test_a_turn_without_tokens_or_with_too_few_numbers_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        Turn([1], [], [], [])
    with pytest.raises(ValueError, match="2 tokens, 1 log-probs, 2 versions"):
        Turn([1], [2, 3], [0.0], [1, 1])
