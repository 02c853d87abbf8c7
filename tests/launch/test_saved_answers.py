"""Saved answers in all forms are accepted as they came, and no other ones."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from support.policies import character_tokenizer
from support.served import TOOL, ScriptedGenerator, Served, serve

from headrace.comm.errors import SettingError
from headrace.launch.report.answers import read_answers

KEY = b"k" * 32
PUBLISHED = {7: {"d7"}}
HELLO: Any = [{"role": "user", "content": "hello"}]
CALL = 'so <tool_call>{"name": "calc", "arguments": {"a": 2}}</tool_call>'
EVERYTHING = {"return_token_ids": True, "logprobs": True}
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
IDS = "/inference/v1/generate"


@pytest.fixture
def served() -> Served:
    """A front whose model answers with text and a call of a tool."""
    tokenizer = character_tokenizer()
    tokens = [*tokenizer.encode(CALL, add_special_tokens=False), 2]
    generator = ScriptedGenerator(
        tokens, logprob=-1e-7, text_of=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
    )
    return serve(generator, tokenizer, digest="d7", receipt_key=KEY)


def problems(file: Path, text: str, published: Any = PUBLISHED) -> list[str]:
    """What is wrong with each response in a file with this text."""
    file.write_text(text)
    return [response.problem(KEY, published) for response in read_answers(file).responses]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "n": 2}),
        (CHAT, {"messages": HELLO, "tools": [TOOL]}),
        (CHAT, {"messages": HELLO, "tools": [TOOL], **EVERYTHING}),
        (TEXT, {"prompt": [[5, 6], [7]], "n": 2}),
        (TEXT, {"prompt": "hello", **EVERYTHING, "logprobs": 0}),
        (IDS, {"token_ids": [5, 6], "sampling_params": {"n": 2, "logprobs": 0}}),
    ],
    ids=str,
)
def test_whole_answers_and_streams(served: Served, tmp_path: Path, path: str, body: dict[str, Any]):
    answer = served.ask(path, body).body
    num = len(answer["choices"])
    line = json.dumps(answer)
    for text in (line, f"[{line}]", f"{line}\n{line}\n", json.dumps(answer, indent=2)):
        assert {*problems(tmp_path / "whole", text)} == {""}
    if path == IDS:
        return
    events = [json.dumps(event) for event in served.events(path, body)]
    for text in ("\n".join(events), "".join(f"data: {event}\n\n" for event in events) + "data: [DONE]\n\n"):
        assert problems(tmp_path / "stream", text) == [""] * num
    assert len(events) > num + 2
    del events[len(events) // 2]
    assert any(problems(tmp_path / "cut", "\n".join(events))), "a part is missing"


def test_the_openai_client_may_write_them(served: Served, tmp_path: Path):
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
    fields: Any = {"model": "policy", "messages": HELLO, "tools": [TOOL], "logprobs": True}
    fields["extra_body"] = {"return_token_ids": True}
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].message.tool_calls
    parts = [*client.chat.completions.create(**fields, stream=True)]
    client.close()
    for kept in ([whole], parts):
        assert problems(tmp_path / "kept", "\n".join(each.model_dump_json() for each in kept)) == [""]
    forged = whole.model_dump()
    forged["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = '{"a": 3}'
    assert "its seal is another one" in problems(tmp_path / "forged", json.dumps(forged))[0]


def test_what_the_journal_has_not_published_is_told(served: Served, tmp_path: Path):
    text = json.dumps(served.ask(TEXT, {"prompt": [5]}).body)
    assert problems(tmp_path / "a", text, {6: {"d7"}}) == ["the run has published no version 7"]
    assert problems(tmp_path / "a", text, {7: {"e1", "e2"}}) == [
        "version 7 has the digest e1 or e2 in the journal, not d7"
    ]
    assert problems(tmp_path / "a", text, {7: {"e1", "d7"}}) == [""]


def test_a_changed_token_is_told(served: Served, tmp_path: Path):
    answer = served.ask(TEXT, {"prompt": [5], "return_token_ids": True}).body
    answer["choices"][0]["token_ids"][-1] += 1
    assert problems(tmp_path / "a", json.dumps(answer)) == ["its tokens are not those of its receipt"]


def test_without_a_key_there_are_digests_and_no_receipt(tmp_path: Path):
    served = serve(ScriptedGenerator(), character_tokenizer(), digest="d7")
    (choice,) = served.ask(TEXT, {"prompt": [5], "max_tokens": 2}).body["choices"]
    assert choice["weight_digests"] == {"7": "d7"} and "receipt" not in choice
    assert problems(tmp_path / "a", json.dumps({"id": "cmpl-1", "choices": [choice]}))[0].startswith(
        "it has no receipt"
    )


@pytest.mark.parametrize("text", ["", "{", "[3]", '{"choices": [{}]}', "[[]]", "\x00"])
def test_other_files_are_named(tmp_path: Path, text: str):
    (tmp_path / "other").write_text(text)
    with pytest.raises(SettingError, match="--answers: .*other has"):
        read_answers(tmp_path / "other")
    with pytest.raises(SettingError, match="--answers: .*none cannot be read"):
        read_answers(tmp_path / "none")
