"""The tokens of a trajectory are those drawn and those inserted, in this order, and read as its template would show it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.policies import character_tokenizer

from headrace.comm.errors import SettingError
from headrace.comm.recipe import DataSettings
from headrace.rollout.engine.chat_template import prompt_tokens
from headrace.rollout.engine.sampling import SamplingParams
from headrace.rollout.engine.sequence import Sequence
from headrace.rollout.environments.base import Episode
from headrace.rollout.environments.tokens import observation_tokens

EOS = "</s>"
markers = st.text("<>[]|#:=ab \n", min_size=1, max_size=5)
words = st.text("abc xyz.", max_size=8)
roles = st.sampled_from(["user", "tool", "system"])
observations = st.lists(st.tuples(roles, words), min_size=1, max_size=3)
turns = st.lists(st.tuples(words, st.booleans(), observations), min_size=1, max_size=4)


def template(head: str, tail: str, opening: str, *, hides_thoughts: bool = False) -> str:
    """A chat template: each message between markers of its role; a turn of the policy ends with its stop token.

    Like Qwen3's, it may show the newest answer otherwise than earlier ones.
    """
    turn = "(thought) " if hides_thoughts else ""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{{{{ {opening!r} }}}}{{% if loop.last %}}{{{{ {turn!r} }}}}{{% endif %}}{{{{ m.content }}}}{EOS}"
        f"{{% else %}}{{{{ m.role }}}}{{{{ {head!r} }}}}{{{{ m.content }}}}{{{{ {tail!r} }}}}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {opening!r} }}}}{{% endif %}}"
    )


def talk(tokenizer: Any, prompt: Any, script: list[tuple[str, bool, Any]]) -> tuple[Sequence, Episode, list[list[int]]]:
    """A trajectory that draws these turns, with a stop token or without, and what was inserted after each."""
    params = SamplingParams(pause_at_stop=True)
    prompt_ids = prompt_tokens({"prompt": prompt}, tokenizer, DataSettings())
    sequence = Sequence(1, 0, prompt_ids, params, 10_000, frozenset([tokenizer.eos_token_id]))
    episode, inserted = Episode(prompt), []
    for text, ends_by_token, observation in script:
        for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
            sequence.append(token, -1.0)
        if ends_by_token:
            sequence.append(tokenizer.eos_token_id, -1.0)
        sequence.finish_reason = "stop"
        episode.end_turn(text, sequence.token_ids)
        inserted.append(observation_tokens(episode, observation, tokenizer, DataSettings()))
        sequence.insert(inserted[-1])
        episode.insert(observation, len(inserted[-1]))
        assert sequence.turn_start == episode.turn_start == len(sequence.token_ids)
    return sequence, episode, inserted


@settings(deadline=None, max_examples=80)
@given(markers, markers, markers, st.booleans(), turns)
def test_a_trajectory_is_what_was_drawn_and_inserted_under_any_template(head, tail, opening, hides_thoughts, script):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template(head, tail, opening, hides_thoughts=hides_thoughts)
    chat = [(text, ends, [{"role": role, "content": word} for role, word in said]) for text, ends, said in script]
    prompt = [{"role": "user", "content": "start"}]
    sequence, episode, inserted = talk(tokenizer, prompt, chat)
    expected, mask = list[int](), list[int]()
    for (text, ends, _), ids in zip(chat, inserted, strict=True):
        drawn = [*tokenizer(text, add_special_tokens=False)["input_ids"], *[tokenizer.eos_token_id] * ends]
        expected += drawn + ids
        mask += [1] * len(drawn) + [0] * len(ids)
    assert sequence.token_ids == expected and episode.loss_mask(len(expected)) == mask
    assert all((logprob == 0) == (kept == 0) for logprob, kept in zip(sequence.logprobs, mask, strict=True))
    shown = tokenizer.apply_chat_template([*prompt, *episode.messages()], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode([*sequence.prompt_ids, *sequence.token_ids]) == shown


@given(st.lists(st.tuples(words, st.booleans(), words.filter(bool)), min_size=1, max_size=4))
def test_a_text_trajectory_is_the_turns_and_the_observations(script):
    tokenizer = character_tokenizer()
    sequence, episode, _ = talk(tokenizer, "prompt", script)
    assert tokenizer.decode(sequence.token_ids, skip_special_tokens=True) == episode.response()
    assert episode.num_inserted() == sum(len(observation) for _, _, observation in script)


def test_a_template_that_changes_the_prompt_when_messages_follow_is_refused():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    script = [("a", True, [{"role": "tool", "content": "b"}])]
    with pytest.raises(SettingError, match="changes earlier messages"):
        talk(tokenizer, [{"role": "user", "content": "start"}], script)


def test_a_cut_mask_names_the_tokens_that_were_inserted_after_a_place():
    episode = Episode("p", inserted=[(3, 2), (9, 4)])
    assert episode.num_inserted() == 6 and episode.num_inserted(start=5) == 4
    assert episode.loss_mask(13) == [1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]
