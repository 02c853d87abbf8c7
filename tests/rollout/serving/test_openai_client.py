"""The official `openai` client."""

from pathlib import Path
from typing import Any

import openai
import pytest
from support.closing import at_end
from support.policies import character_tokenizer
from support.served import TOOL, ScriptedGenerator, serve

from headrace.rollout import Engine, SamplingParams

HELLO: Any = [{"role": "user", "content": "hello"}]
KEY = "a-key-of-12-characters"
CALL = '<tool_call>{"name": "calc", "arguments": {"a": 2}}</tool_call>'


def client_of(url: str, key: str = KEY) -> openai.OpenAI:
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    at_end(client.close)
    return client


@pytest.fixture
def client(llama: Path) -> openai.OpenAI:
    return client_of(serve(Engine(llama, max_running=4), character_tokenizer(), keys=[KEY]).url)


def test_chat_with_logprobs_and_token_ids(client: openai.OpenAI, llama: Path):
    (model,) = client.models.list().data
    assert model.model_extra is not None and model.model_extra["max_model_len"] == 256
    answer: Any = client.chat.completions.create(
        model=model.id,
        messages=HELLO,
        max_completion_tokens=10,
        seed=1,
        logprobs=True,
        n=2,
        extra_body={"return_token_ids": True},
    )
    expected = Engine(llama, max_running=4).generate(
        [answer.prompt_token_ids], SamplingParams(max_new_tokens=10, seed=1, n=2)
    )
    assert [choice.token_ids for choice in answer.choices] == [done.token_ids for done in expected]
    assert [choice.message.content for choice in answer.choices] == [done.text for done in expected]
    for choice, done in zip(answer.choices, expected, strict=True):
        assert [each.logprob for each in choice.logprobs.content] == pytest.approx(done.logprobs, abs=1e-5)
        assert choice.weight_version == [7] * len(done.token_ids)


def test_streams(client: openai.OpenAI):
    fields: Any = {"model": "policy", "messages": HELLO, "max_tokens": 10, "seed": 2}
    whole = client.chat.completions.create(**fields)
    parts = [*client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})]
    assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == whole.choices[0].message.content
    assert parts[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert parts[-1].usage == whole.usage
    text = client.completions.create(model="policy", prompt=[5, 6], max_tokens=5, logprobs=0, seed=2)
    pieces = [*client.completions.create(model="policy", prompt=[5, 6], max_tokens=5, seed=2, stream=True)]
    assert "".join(piece.choices[0].text for piece in pieces) == text.choices[0].text


@pytest.mark.parametrize("streams", [False, True])
def test_tools(streams: bool):
    tokenizer = character_tokenizer()
    script = [*tokenizer.encode(CALL, add_special_tokens=False), 2]
    generator = ScriptedGenerator(script, text_of=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)))
    client = client_of(serve(generator, tokenizer, keys=[KEY], context=1000).url)
    fields: Any = {"model": "policy", "messages": HELLO, "tools": [TOOL], "tool_choice": "auto"}
    if streams:
        with client.chat.completions.stream(**fields) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**fields).choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function" and (call.function.name, call.function.arguments) == ("calc", '{"a": 2}')
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    sent_back: Any = message.model_dump(exclude_unset=True)
    assert client.chat.completions.create(**{**fields, "messages": [*HELLO, sent_back, result]}).choices


def test_errors_are_those_of_the_client(client: openai.OpenAI):
    url = str(client.base_url)
    with pytest.raises(openai.AuthenticationError):
        client_of(url, "wrong-key").models.list()
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'"):
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as told:
        client.chat.completions.create(model="policy", messages=HELLO, max_tokens=1000)
    assert (told.value.param, told.value.code) == ("max_tokens", "context_length_exceeded")
