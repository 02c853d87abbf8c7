"""The pieces of a streamed text are the whole text, and none of them takes back what was sent."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.policies import STORIES, character_tokenizer

from headrace.rollout.serving.text_stream import TextStream
from headrace.trainer.policy.model import load_tokenizer

TOKENIZERS = {"stories": load_tokenizer(STORIES), "characters": character_tokenizer()}


def encode(text: str) -> list[int]:
    return TOKENIZERS["characters"].encode(text, add_special_tokens=False)


def pieces_of(stream: TextStream, tokens: list[int], at_a_time: int = 1) -> list[str]:
    return [stream.add(tokens[start : start + at_a_time]) for start in range(0, len(tokens), at_a_time)]


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40), st.integers(1, 5))
def test_pieces_of_any_text_are_the_text(text: str, at_a_time: int):
    tokenizer = TOKENIZERS["stories"]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    stream = TextStream(tokenizer, ["<tool_call>"])
    assert "".join(pieces_of(stream, tokens, at_a_time)) + stream.rest(whole) == whole


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(3, 511), max_size=40))
def test_pieces_of_any_tokens_are_the_text(tokens: list[int]):
    """Bytes that make no character included."""
    tokenizer = TOKENIZERS["stories"]
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    stream = TextStream(tokenizer, [])
    sent = "".join(pieces_of(stream, tokens))
    assert whole.startswith(sent)
    assert sent + stream.rest(whole) == whole


def test_what_may_become_a_stop_string_waits():
    stream = TextStream(TOKENIZERS["characters"], ["END"])
    assert pieces_of(stream, encode("a EN EN")) == ["a", " ", "", "", "EN ", "", ""]
    assert stream.add(encode("D!")) == ""
    assert stream.rest("a EN ") == ""


@pytest.mark.parametrize("marks", [[], ["ZZ"]])
def test_text_without_a_mark_does_not_wait(marks: list[str]):
    assert pieces_of(TextStream(TOKENIZERS["characters"], marks), encode("abc")) == ["a", "b", "c"]
