"""A text that goes on behind an answer keeps the tokens of that answer; any other is tokenized as a whole."""

from support.policies import character_tokenizer

from headrace.rollout.serving.known_texts import KnownTexts

EOS = 2


def test_a_text_that_goes_on_keeps_the_tokens_before_it_with_those_that_are_no_text():
    tokenizer = character_tokenizer()
    known = KnownTexts(tokenizer)
    prompt = known.tokens("ab")
    assert prompt == tokenizer.encode("ab")
    drawn = [*tokenizer.encode("cd", add_special_tokens=False), EOS]
    known.remember("ab", prompt, drawn)
    inserted = tokenizer.encode("ef", add_special_tokens=False)
    assert known.tokens("abcdef") == [*prompt, *drawn, *inserted]
    assert known.tokens("abcd") == [*prompt, *drawn], "nothing is added"
    assert known.tokens("abxd") == tokenizer.encode("abxd"), "it was changed"
    known.remember("abcdef", known.tokens("abcdef"), [EOS])
    assert known.tokens("abcdefg")[:-1] == [*prompt, *drawn, *inserted, EOS], "the longest known text counts"
