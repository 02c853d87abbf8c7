"""Answers over HTTP are what the engine generates: tokens, log-probs, text, whole and as a stream."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from support.policies import STORIES, character_tokenizer, plain_logprobs
from support.served import CHAT, TOOL, ScriptedGenerator, Served, serve
from transformers import AutoModelForCausalLM

from headrace.rollout import Engine, SamplingParams
from headrace.rollout.engine.chat_template import prompt_tokens
from headrace.rollout.environments.base import Episode
from headrace.rollout.environments.tokens import observation_tokens
from headrace.rollout.serving.conversations import Conversations
from headrace.trainer.policy.model import load_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
CHAT_PATH, TEXT_PATH, IDS_PATH = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"


@pytest.fixture
def served(llama: Path) -> Served:
    return serve(Engine(llama, max_running=8), character_tokenizer())


@pytest.fixture
def engine(llama: Path) -> Engine:
    return Engine(llama, max_running=8)


def scripted(text: str, **settings: Any) -> Served:
    """A front whose model always answers with this text."""
    tokenizer = character_tokenizer()
    tokens = [*tokenizer.encode(text, add_special_tokens=False), 2]
    generator = ScriptedGenerator(tokens, text_of=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)))
    return serve(generator, tokenizer, **settings)


def test_prompts_and_seeds_give_the_tokens_of_the_engine(served: Served, engine: Engine):
    prompts = [[5, 6, 7], [9], [30, 31, 32, 33]]
    body = {"prompt": prompts, "n": 2, "seed": 3, "max_tokens": 12, "return_token_ids": True, "logprobs": 0}
    answer = served.ask(TEXT_PATH, body).body
    expected = engine.generate(prompts, SamplingParams(max_new_tokens=12, n=2, seed=3))
    assert [choice["index"] for choice in answer["choices"]] == [*range(6)]
    for index, (choice, done) in enumerate(zip(answer["choices"], expected, strict=True)):
        assert choice["token_ids"] == done.token_ids
        assert choice["prompt_token_ids"] == prompts[index // 2]
        assert choice["text"] == done.text
        assert choice["finish_reason"] == done.finish_reason
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(done.logprobs, abs=1e-5)
        assert choice["weight_version"] == [7] * len(done.token_ids)
    num_drawn = sum(len(done.token_ids) for done in expected)
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": num_drawn, "total_tokens": 8 + num_drawn}


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_logprobs_are_those_of_the_policy_at_the_temperature(served: Served, llama: Path, temperature: float):
    body = {"messages": HELLO, "temperature": temperature, "logprobs": True, "max_tokens": 9, "return_token_ids": True}
    answer = served.ask(CHAT_PATH, body).body
    (choice,) = answer["choices"]
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    expected = plain_logprobs(model, answer["prompt_token_ids"], choice["token_ids"], temperature)
    content = choice["logprobs"]["content"]
    assert [each["logprob"] for each in content] == pytest.approx(expected.tolist(), abs=1e-4)
    texts = [character_tokenizer().decode([token]) for token in choice["token_ids"]]
    assert [each["token"] for each in content] == texts
    assert [bytes(each["bytes"]).decode() for each in content] == texts


def test_a_stop_string_ends_the_text_before_it_and_not_the_tokens(served: Served, engine: Engine):
    whole = engine.generate([[5, 6]], SamplingParams(max_new_tokens=40, temperature=0))[0].text
    stop = whole[5:7]
    body = {"prompt": [5, 6], "temperature": 0, "max_tokens": 40, "stop": [stop], "return_token_ids": True}
    (choice,) = served.ask(TEXT_PATH, body).body["choices"]
    expected = engine.generate([[5, 6]], SamplingParams(max_new_tokens=40, temperature=0, stop=stop))[0]
    assert (choice["text"], choice["token_ids"]) == (whole[: whole.index(stop)], expected.token_ids)
    parts = [event["choices"][0] for event in served.events(TEXT_PATH, body)]
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert parts[-1]["finish_reason"] == "stop"


def test_a_stream_is_the_whole_answer_in_parts(served: Served):
    body = {"messages": HELLO, "seed": 5, "n": 3, "max_tokens": 15, "logprobs": True, "return_token_ids": True}
    whole = served.ask(CHAT_PATH, body).body
    events = served.events(CHAT_PATH, {**body, "stream_options": {"include_usage": True}})
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    *parts, usage = events
    assert usage["usage"] == whole["usage"] and usage["choices"] == []
    for choice in whole["choices"]:
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(part["delta"].get("content", "") for part in own) == choice["message"]["content"]
        assert [token for part in own[1:] for token in part["token_ids"]] == choice["token_ids"]
        assert [v for part in own[1:] for v in part["weight_version"]] == choice["weight_version"]
        logprobs = [each for part in own[1:] for each in part["logprobs"]["content"]]
        assert [each["token"] for each in logprobs] == [each["token"] for each in choice["logprobs"]["content"]]
        reasons = [part["finish_reason"] for part in own]
        assert reasons[-1] == choice["finish_reason"] and not any(reasons[:-1])


def test_a_generation_from_ids(served: Served, engine: Engine):
    sampling = {"max_tokens": 6, "seed": 1, "logprobs": 1, "temperature": 0.7, "skip_special_tokens": False}
    answer = served.ask(IDS_PATH, {"model": "policy", "token_ids": [5, 6], "sampling_params": sampling}).body
    (done,) = engine.generate([[5, 6]], SamplingParams(max_new_tokens=6, seed=1, temperature=0.7))
    (choice,) = answer["choices"]
    assert choice["token_ids"] == done.token_ids
    assert [each["token"] for each in choice["logprobs"]["content"]] == [
        f"token_id:{token}" for token in done.token_ids
    ]
    assert answer["request_id"] and choice["finish_reason"] == done.finish_reason


def test_five_turns_have_the_tokens_of_an_environment():
    """The turns of the model are not tokenized again, though their text, up to the stop string, would become other tokens."""
    tokenizer = load_tokenizer(STORIES)
    served = serve(Engine(STORIES, max_running=2), load_tokenizer(STORIES), context=512, vocab_size=512)
    engine = Engine(STORIES, max_running=2)
    episode = Episode([{"role": "user", "content": "Once upon a time"}])
    prompt = prompt_tokens({"prompt": episode.prompt}, tokenizer, CHAT)
    engine.add_group(prompt, SamplingParams(max_new_tokens=400, temperature=0, stop="e", pause_at_stop=True), [0])
    messages = [*episode.prompt]
    num_rendered_otherwise = 0
    for turn in range(5):
        while not (finished := engine.step()):
            pass
        (done,) = finished
        before = [*done.prompt_ids, *done.token_ids[: episode.turn_start]]
        drawn = done.token_ids[episode.turn_start :]
        body = {"messages": messages, "temperature": 0, "stop": "e", "return_token_ids": True}
        answer = served.ask(CHAT_PATH, body).body
        assert answer["prompt_token_ids"] == before
        assert answer["choices"][0]["token_ids"] == drawn
        num_rendered_otherwise += prompt_tokens({"prompt": messages}, tokenizer, CHAT) != before
        episode.end_turn(done.text, done.token_ids)
        observation = [{"role": "user", "content": f"and then {turn}?"}]
        messages += [answer["choices"][0]["message"], *observation]
        tokens = observation_tokens(episode, observation, tokenizer, CHAT)
        assert engine.resume(0, tokens)
        episode.insert(observation, len(tokens))
    assert num_rendered_otherwise == 4, "the test would pass if the turns were tokenized again"


def test_another_conversation_is_tokenized_as_the_template_says():
    conversations = Conversations(character_tokenizer(), CHAT)
    first = conversations.prompt(HELLO, [], {})
    conversations.remember(first, {"role": "assistant", "content": "ab"}, [9, 9, 2])
    goes_on = [*HELLO, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "more"}]
    kept = conversations.prompt(goes_on, [], {})
    assert kept.token_ids[: len(first.token_ids) + 3] == [*first.token_ids, 9, 9, 2]
    fresh = prompt_tokens({"prompt": goes_on}, character_tokenizer(), CHAT)
    assert kept.token_ids != fresh
    edited = [HELLO[0], {"role": "assistant", "content": "abc"}, goes_on[2]]
    assert conversations.prompt(edited, [], {}).token_ids == prompt_tokens(
        {"prompt": edited}, character_tokenizer(), CHAT
    )
    assert conversations.prompt(goes_on, [TOOL], {}).token_ids != kept.token_ids, "tools are another conversation"
    assert conversations.prompt(goes_on, [], {"thinks": True}).token_ids == fresh, (
        "and so are arguments of the template"
    )


def test_old_conversations_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.rollout.serving.conversations.MOST_TOKENS", 100)
    conversations = Conversations(character_tokenizer(), CHAT)
    answer = {"role": "assistant", "content": "x"}
    for number in range(20):
        prompt = conversations.prompt([{"role": "user", "content": str(number)}], [], {})
        conversations.remember(prompt, answer, [9])
    goes_on = [{"role": "user", "content": "?"}, answer, {"role": "user", "content": "more"}]
    for number, is_kept in ((0, False), (19, True)):
        goes_on[0] = {"role": "user", "content": str(number)}
        assert (9 in conversations.prompt(goes_on, [], {}).token_ids) == is_kept


def test_calls_of_tools_become_fields():
    text = 'let me see <tool_call>{"name": "calc", "arguments": {"a": "1+1"}}</tool_call>'
    served = scripted(text)
    body = {"messages": HELLO, "tools": [TOOL]}
    (choice,) = served.ask(CHAT_PATH, body).body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "let me see "
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"]
    assert call["function"] == {"name": "calc", "arguments": '{"a": "1+1"}'}
    parts = [event["choices"][0] for event in served.events(CHAT_PATH, body)]
    assert "".join(part["delta"].get("content", "") for part in parts) == "let me see "
    (last,) = (part for part in parts if "tool_calls" in part["delta"])
    assert last["finish_reason"] == "tool_calls"
    assert last["delta"]["tool_calls"][0]["index"] == 0
    assert last["delta"]["tool_calls"][0]["function"] == call["function"]
    for without in ({"messages": HELLO}, {**body, "tool_choice": "none"}):
        (plain,) = served.ask(CHAT_PATH, without).body["choices"]
        assert plain["message"]["content"] == text and plain["finish_reason"] == "stop"


def test_a_call_that_cannot_be_read_stays_text():
    text = 'a <tool_call>{"name": </tool_call> b'
    served = scripted(text)
    body = {"messages": HELLO, "tools": [TOOL]}
    (choice,) = served.ask(CHAT_PATH, body).body["choices"]
    assert choice["message"] == {"role": "assistant", "content": text}
    parts = [event["choices"][0]["delta"].get("content", "") for event in served.events(CHAT_PATH, body)]
    assert "".join(parts) == text


def test_a_turn_with_calls_goes_on_with_its_tokens():
    served = scripted('<tool_call>{"name": "calc", "arguments": {}}</tool_call>')
    body = {"messages": HELLO, "tools": [TOOL], "return_token_ids": True}
    answer = served.ask(CHAT_PATH, body).body
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    result = {"role": "tool", "content": "4", "tool_call_id": message["tool_calls"][0]["id"]}
    after = served.ask(CHAT_PATH, {**body, "messages": [*HELLO, message, result]}).body
    drawn = [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]]
    assert after["prompt_token_ids"][: len(drawn)] == drawn
    assert len(after["prompt_token_ids"]) > len(drawn)


def test_tools_that_the_template_does_not_show_are_refused():
    plain = type(CHAT)(chat_template=CHAT.chat_template.partition("{% endif %}")[2])
    reply = scripted("x", data=plain).ask(CHAT_PATH, {"messages": HELLO, "tools": [TOOL]})
    assert reply.status == 400 and reply.body["error"]["param"] == "tools"


def test_a_model_without_a_template_completes_text_alone():
    reply = scripted("x", data=type(CHAT)()).ask(CHAT_PATH, {"messages": HELLO})
    assert reply.status == 400 and "data.chat_template" in reply.body["error"]["message"]


def test_logits_that_are_not_finite_are_an_error_of_the_server():
    served = serve(ScriptedGenerator([5], text_of=lambda _: "", reason="error"), character_tokenizer())
    reply = served.ask(CHAT_PATH, {"messages": HELLO})
    assert (reply.status, reply.body["error"]["code"]) == (500, "not_finite")
    assert served.events(CHAT_PATH, {"messages": HELLO})[-1]["error"]["code"] == "not_finite"


def test_clients_at_the_same_time_get_their_own_answers(served: Served, engine: Engine):
    async def all_of_them() -> list[Any]:
        bodies = [{"prompt": [5 + i], "seed": i, "max_tokens": 20, "return_token_ids": True} for i in range(24)]
        return await asyncio.gather(*(asyncio.to_thread(served.ask, TEXT_PATH, body) for body in bodies))

    replies = asyncio.run(all_of_them())
    for index, reply in enumerate(replies):
        (done,) = engine.generate([[5 + index]], SamplingParams(max_new_tokens=20, seed=index))
        assert reply.body["choices"][0]["token_ids"] == done.token_ids
