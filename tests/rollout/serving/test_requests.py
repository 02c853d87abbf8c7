"""Every field of a request has its effect or is refused by its name."""

from typing import Any

import pytest

from headrace.rollout.engine.sampling import SamplingParams
from headrace.rollout.serving.fields import RequestRefused
from headrace.rollout.serving.requests import read_chat, read_ids, read_text

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}


def chat(**fields: Any):
    return read_chat({"messages": HELLO, **fields}, "policy")


def refused(**fields: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as told:
        chat(**fields)
    return told.value


def params(**fields: Any) -> SamplingParams:
    return chat(**fields).sampling.params("messages", 10, 100)


@pytest.mark.parametrize(
    ("field", "value", "name", "expected"),
    [
        ("temperature", 0, "temperature", 0.0),
        ("top_p", 0.5, "top_p", 0.5),
        ("top_k", 3, "top_k", 3),
        ("top_k", -1, "top_k", 0),
        ("min_p", 0.1, "min_p", 0.1),
        ("repetition_penalty", 1.5, "repetition_penalty", 1.5),
        ("n", 4, "n", 4),
        ("seed", 11, "seed", 11),
        ("stop", "x", "stop", ("x",)),
        ("stop", ["x", "yz"], "stop", ("x", "yz")),
        ("stop_token_ids", [5, 6], "stop", (5, 6)),
        ("ignore_eos", True, "ignore_eos", True),
        ("max_tokens", 12, "max_new_tokens", 12),
        ("max_completion_tokens", 13, "max_new_tokens", 13),
        ("max_tokens", 12.0, "max_new_tokens", 12),
        ("temperature", None, "temperature", 1.0),
    ],
)
def test_a_field_of_sampling_has_its_effect(field: str, value: Any, name: str, expected: Any):
    assert getattr(params(**{field: value}), name) == expected


def test_a_chat_may_fill_the_context_and_a_text_has_sixteen_tokens():
    assert params().max_new_tokens == 90
    assert read_text({"prompt": "a"}, "policy").sampling.params("prompt", 1, 100).max_new_tokens == 16


def test_without_a_seed_two_requests_differ():
    assert params().seed != params().seed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"n": 1.5}, "n"),
        ({"seed": 10**30}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"frequency_penalty": False}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"functions": []}, "functions"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"often": True}}, "stream_options.often"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "calc"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, {"type": "search"}]}, "tools[1].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]}, "tools[0].function.strict"),
        ({"tools": "calc"}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "robot", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content.type"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_a_mistake_is_refused_by_the_name_of_its_field(fields: dict[str, Any], param: str):
    error = refused(**fields)
    assert error.param == param
    assert error.body()["error"]["message"].startswith(f"{param}: ")
    assert error.status == 400


def test_an_unknown_field_names_the_nearest_and_an_unknown_model_is_not_found():
    assert "temperature" in str(refused(temprature=1))
    error = refused(model="gpt-4")
    assert (error.status, error.code) == (404, "model_not_found")
    assert chat(model="policy")


def test_values_that_ask_for_nothing_are_accepted():
    chat(
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        top_logprobs=0,
        user="me",
        response_format={"type": "text"},
    )
    chat(unknown_but_null=None, parallel_tool_calls=True, store=False, tools=[], tool_choice="none")


def test_a_prompt_that_is_too_long_and_a_response_that_is_too_long_are_told_apart():
    with pytest.raises(RequestRefused) as told:
        chat().sampling.params("messages", 100, 100)
    assert (told.value.param, told.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(RequestRefused) as told:
        chat(max_completion_tokens=91).sampling.params("messages", 10, 100)
    assert told.value.param == "max_completion_tokens" and "at most 90" in str(told.value)


def test_messages_are_in_the_form_of_templates():
    call = {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": '{"a": 1}'}}
    given = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": {"a": 1}}}
    assert chat(messages=given).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("ab", ["ab"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_a_text_completion_takes_text_and_ids(prompt: Any, prompts: Any):
    assert read_text({"prompt": prompt}, "policy").prompts == prompts


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": []},
        {"prompt": ""},
        {"prompt": ["a", ""]},
        {"prompt": [1.5]},
        {"prompt": 5},
        {},
        {"prompt": "a", "logprobs": 3},
        {"prompt": "a", "logprobs": True},
        {"prompt": "a", "echo": True},
        {"prompt": "a", "best_of": 2},
        {"prompt": ["a"] * 100, "n": 2},
    ],
)
def test_a_text_completion_refuses(fields: dict[str, Any]):
    with pytest.raises(RequestRefused):
        read_text(fields, "policy")


def test_a_generation_from_ids_has_its_parameters_inside():
    body = {
        "model": "policy",
        "token_ids": [1, 2],
        "sampling_params": {"max_tokens": 5, "logprobs": 1, "stop_token_ids": [9]},
    }
    asked = read_ids(body, "policy")
    assert asked.prompt == [1, 2]
    assert asked.sampling.params("token_ids", 2, 100).stop == (9,)
    assert asked.form.with_logprobs and asked.form.names_ids
    for inner, param in (({"logprobs": 5}, "sampling_params.logprobs"), ({"max_token": 5}, "sampling_params.max_token"),
                         ({"temperature": -1}, "sampling_params.temperature")):  # fmt: skip
        with pytest.raises(RequestRefused) as told:
            read_ids({**body, "sampling_params": inner}, "policy")
        assert told.value.param == param
    with pytest.raises(RequestRefused, match=r"^stream: "):
        read_ids({**body, "stream": True}, "policy")
