"""The texts of a row's tokens are the row's text, in whatever form a tokenizer has its spaces and bytes."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies
from support.policies import STORIES, tiny_policy
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.trainer.policy.model import load_tokenizer
from headrace.trainer.record.token_texts import TokenTexts


def byte_level() -> PreTrainedTokenizerFast:
    """As Qwen's and Llama 3's: a token of one byte each, so that a character beyond ASCII takes several."""
    vocabulary = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def metaspace() -> PreTrainedTokenizerFast:
    """As Llama 2's: spaces are in tokens, the first one is left out, and unknown characters are bytes."""
    characters = [chr(code) for code in range(33, 127)]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *characters, *(f"▁{c}" for c in characters)]
    merges = [("▁", char) for char in characters]
    tokenizer = Tokenizer(
        models.BPE({piece: n for n, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


KINDS: dict[str, Any] = {"byte level": byte_level(), "metaspace": metaspace()}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=strategies.text(strategies.characters(codec="utf-8", exclude_characters="\r▁"), max_size=30))
def test_all_texts_together_are_the_text(kind: str, text: str):
    tokenizer = KINDS[kind]
    texts = TokenTexts(tokenizer)
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    each = texts.each(ids)
    assert len(each) == len(ids) and each[-1] == tokenizer.eos_token
    assert "".join(each).lstrip(" ") == texts.whole(ids).lstrip(" ")


def test_the_last_token_of_a_character_has_it_and_the_others_have_none():
    tokenizer = KINDS["byte level"]
    ids = tokenizer.encode("a€b", add_special_tokens=False)
    assert TokenTexts(tokenizer).each(ids) == ["a", "", "", "€", "b"]
    assert TokenTexts(tokenizer).each(ids[:3]) == ["a", "", "\ufffd"], "a response may be cut within a character"


@pytest.mark.parametrize("policy", ["tiny", "stories"])
def test_the_texts_of_random_tokens_of_real_policies_are_their_text(tmp_path: Path, policy: str):
    tokenizer = load_tokenizer(tiny_policy(tmp_path, "llama") if policy == "tiny" else STORIES)
    ids = [(7 * i * i + 3 * i) % len(tokenizer) for i in range(300)]
    texts = TokenTexts(tokenizer)
    assert "".join(texts.each(ids)).strip() == texts.whole(ids).strip()
