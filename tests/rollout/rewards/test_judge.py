"""A model behind a chat endpoint grades responses, and any server gives scores for rows."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from support.http_server import chat, serving

from headrace.comm.errors import SettingError
from headrace.comm.messages import GroupId
from headrace.comm.recipe import RewardSettings
from headrace.rollout.leased_row import LeasedRow
from headrace.rollout.rewards.addresses import open_address
from headrace.rollout.rewards.endpoint import Address, Endpoint, EndpointError
from headrace.rollout.rewards.function import RewardFunction, Scores, WrongLength, combined
from headrace.rollout.rewards.judge import CUT, NO_NUMBER, OUT_OF_RANGE, read_score
from headrace.rollout.rewards.pool import UNSCORED, RewardCall

KEY = "sk-0123456789"


def score(path: str, *completions: Any, timeout_s: float = 60.0, prompt: Any = "2 + 2?", **columns: Any) -> Scores:
    """The rewards of a call as the reward process makes it."""
    function = RewardFunction("judge", open_address(path, timeout_s))
    num = len(completions)
    batch = {"prompts": [prompt] * num, "completions": list(completions), "completion_ids": [[1]] * num}
    return asyncio.run(
        function.score_async({**batch, "columns": {name: [value] * num for name, value in columns.items()}})
    )


def judge(url: str, *options: str) -> str:
    return f"judge+{url}/v1#" + "&".join(("model=m", *options))


def test_a_judge_is_asked_with_question_reference_and_response_and_its_score_is_the_reward():
    with serving(lambda number, body: (200, chat("It is right.\n**Score:** 0.75"))) as server:
        scores = score(judge(server.url, "max_tokens=64"), "four, and {answer}", answer=4)
    assert scores.rewards == [0.75]
    assert server.paths == ["/v1/chat/completions"]
    (body,) = server.bodies
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0, 64)
    text = body["messages"][0]["content"]
    assert "Question:\n2 + 2?\n" in text and "Reference answer:\n4\n" in text and "four, and {answer}\n" in text


def test_without_a_reference_the_judge_is_not_shown_one_and_a_chat_is_shown_by_its_last_message():
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    with serving(lambda number, body: (200, chat("1"))) as server:
        scores = score(judge(server.url), [{"role": "assistant", "content": "Hello"}], prompt=prompt, answer=None)
    text = server.bodies[0]["messages"][0]["content"]
    assert scores.rewards == [1.0]
    assert "eference" not in text and "system: Be brief.\n\nuser: Hi\n" in text and "grade:\nHello\n" in text


def test_the_users_template_takes_columns_and_gives_the_score_its_own_range(tmp_path: Path):
    template = tmp_path / "my judge.txt"
    template.write_text('{topic}: {prompt} -> {response}. Answer as {"score": 1 to 10}.')
    with serving(lambda number, body: (200, chat('{"score": 8}'))) as server:
        path = judge(server.url, f"template={template}")
        assert score(path, "x", topic="sums").rewards == [8.0]
        assert server.bodies[0]["messages"][0]["content"] == 'sums: 2 + 2? -> x. Answer as {"score": 1 to 10}.'
        with pytest.raises(ValueError, match=r"the judge's template has \{topic\}, but the row has prompt, response"):
            score(path, "x")


@pytest.mark.parametrize(
    ("text", "reason"), [("I cannot say.", NO_NUMBER), (None, NO_NUMBER), ("Score: 7", OUT_OF_RANGE)]
)
def test_an_answer_without_a_usable_score_is_no_reward_and_its_reason_is_counted(text: str | None, reason: str):
    with serving(lambda number, body: (200, chat(text))) as server:
        scores = score(judge(server.url), "x")
    assert scores.rewards == [None]
    request = LeasedRow(GroupId(0, 0).row(0), 1, 0, {"prompt": "p"}, response="x")
    ((reward, info),) = combined(["judge"], [1.0], [scores])
    RewardCall([[request]]).settle({"rewards": [reward], "info": [info]})
    assert scores.extra[0]["judge/reason"] == reason
    assert request.failure == f"{UNSCORED}: {reason}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0.5", 0.5),
        ("I give 8/10.", 0.8),
        ("Score: 0.2. On reflection, Score: .9", 0.9),
        ("<think>Score: 1</think> Score = 0", 0.0),
        ("score: -1", -1.0),
        ("3 of 4 are right", None),
        ("Score: 1/0", None),
        ("**Final_score**: 3, for 2 reasons", 3.0),
        ("Score: _0.8_", 0.8),
        ("Score: 0,8", None),
        ("Score: 1e-3", None),
        ("Score: 1%, which is 0.01", None),
        ("Score: 0.5 %", None),
        ("0,8", None),
        ("1e-3", None),
        ("85%", None),
        ("Score: 8/10%", None),
        ("Score: 1-2", None),
        ("An underscore: 3 of 4", None),
        ("none", None),
    ],
)
def test_a_score_is_the_last_named_one_or_the_only_number(text: str, found: float | None):
    assert read_score(text) == found


def test_an_answer_that_was_cut_off_is_no_reward():
    answer = chat("<think>\nOkay, let me sort the digits. The first is 1")
    answer["choices"][0]["finish_reason"] = "length"
    with serving(lambda number, body: (200, answer)) as server:
        scores = score(judge(server.url), "x")
    assert (scores.rewards, scores.extra[0]["judge/reason"]) == ([None], CUT)


@pytest.mark.parametrize("content", [[{"type": "text", "text": "1"}], 1])
def test_a_content_that_is_no_text_is_named(content: Any):
    with (
        serving(lambda number, body: (200, chat(content))) as server,
        pytest.raises(EndpointError, match="not a chat completion"),
    ):
        score(judge(server.url), "x")


@pytest.mark.parametrize("call", ["", "/", "/chat/completions"])
def test_the_query_of_a_judges_address_follows_its_path(call: str):
    with serving(lambda number, body: (200, chat("1"))) as server:
        assert score(f"judge+{server.url}/v1{call}?api-version=2#model=m", "x").rewards == [1.0]
    assert server.paths == ["/v1/chat/completions?api-version=2"]


@pytest.mark.parametrize("key", ["sk-a\nb", "sk-é"])
def test_a_key_that_no_header_can_have_is_refused_at_the_start(key: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_KEY", key)
    with pytest.raises(SettingError, match=r"^reward.path: key=MY_KEY: a key has printable ASCII") as caught:
        open_address("http://host/score#key=MY_KEY", 30.0)
    assert key not in str(caught.value)


def test_a_busy_endpoint_is_asked_again_and_a_refusal_is_not():
    with serving(lambda number, body: (503, "") if number == 0 else (200, {"scores": [1]})) as server:
        assert score(f"{server.url}/score", "x").rewards == [1.0]
        assert len(server.bodies) == 2
    with serving(lambda number, body: (404, b"no\nsuch model")) as server:
        with pytest.raises(EndpointError, match="HTTP 404 Not Found: no such model$"):
            score(f"{server.url}/score", "x")
        assert len(server.bodies) == 1


def test_an_endpoint_that_stays_busy_fails_within_the_deadline_with_its_last_reason():
    with serving(lambda number, body: (429, "", {"Retry-After": "100"})) as server:
        with pytest.raises(EndpointError, match="HTTP 429 Too Many Requests$"):
            score(f"{server.url}/score", "x")
        assert len(server.bodies) == 1  # it would answer after the deadline alone


def test_an_endpoint_that_does_not_answer_fails_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(EndpointError, match="no answer in time$"):
        score(f"http://127.0.0.1:{silent.getsockname()[1]}/score", "x", timeout_s=0.5)


def test_an_endpoint_that_is_not_there_says_so():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(EndpointError, match="Connection refused$"):
        score(f"http://127.0.0.1:{port}/score", "x", timeout_s=0.5)


def test_a_server_gets_rows_with_their_columns_and_answers_with_scores():
    answer = {"scores": [1, None, {"score": 0.5, "style": 2}]}
    with serving(lambda number, body: (200, answer)) as server:
        scores = score(f"{server.url}/score", "a", "b", "c", level=3)
    assert server.bodies[0]["rows"][1] == {"prompt": "2 + 2?", "completion": "b", "level": 3}
    assert scores.rewards == [1.0, None, 0.5] and scores.metrics[2] == {"judge/style": 2.0}


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"<html>", EndpointError, "the answer is not JSON"),
        ({"rewards": [1]}, EndpointError, "neither"),
        ([1, 2], WrongLength, "2 rewards for 1 completions"),
        (["good"], TypeError, "is not a number"),
    ],
)
def test_an_answer_of_another_form_is_named(answer: Any, error: type[Exception], message: str):
    with serving(lambda number, body: (200, answer)) as server, pytest.raises(error, match=message):
        score(f"{server.url}/score", "x")


def test_the_key_is_sent_as_a_bearer_token_and_is_in_no_message_and_follows_no_redirection(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("MY_KEY", f"{KEY}\n")
    with serving(lambda number, body: (401, f"wrong key {KEY}".encode())) as server:
        with pytest.raises(EndpointError, match=r"HTTP 401 Unauthorized: wrong key \*\*\*$"):
            score(f"{server.url}/score#key=MY_KEY", "x")
        assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
        elsewhere = {"Location": server.url}
        with (
            serving(lambda number, body: (307, "", elsewhere)) as first,
            pytest.raises(EndpointError, match="HTTP 307"),
        ):
            score(f"{first.url}/score#key=MY_KEY", "x")
        assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("judge+http://host/v1", "does not name the judge's model; add #model=NAME"),
        ("judge+http://host/v1#model=m&template=no.txt", "cannot read the judge's template no.txt"),
        ("http://host/score#key=NOT_SET", "the environment variable NOT_SET is not set"),
        ("http://host/score#model=m", "has the option 'model'; the options are key and name"),
        ("http://user:secret@host/score", "holds a password"),
        ("ftp://host/score", "is not of the form"),
        ("judge://host/v1", "is not of the form"),
        ("http://host:port/score", "is not an address"),
    ],
)
def test_a_mistake_in_an_address_is_one_line_that_names_the_setting(path: str, message: str):
    with pytest.raises(SettingError, match=f"^reward.path: .*{message}") as caught:
        open_address(path, 30.0)
    assert "secret" not in str(caught.value)


def test_a_template_without_a_place_for_the_response_is_refused(tmp_path: Path):
    (tmp_path / "judge.txt").write_text("Is {prompt} hard?")
    with pytest.raises(SettingError, match=r"has no \{response\}, where the response goes"):
        open_address(f"judge+http://host/v1#model=m&template={tmp_path / 'judge.txt'}", 30.0)


def test_addresses_have_names_of_their_own_in_the_metrics():
    paths = ("judge+http://host:1/v1#model=m", "http://host/score", "http://host:8000", "http://host/score#name=other")
    assert list(RewardSettings(path=paths).functions) == ["judge", "score", "host", "other"]
    with pytest.raises(SettingError, match="the name 'score' is already taken.*#name=NAME"):
        _ = RewardSettings(path=(paths[1], paths[1])).functions


def test_the_options_of_an_address_are_not_sent():
    address = Address.of("https://host/score?version=1#key=K&name=n")
    assert address == ("https://host/score?version=1", {"key": "K", "name": "n"})
    with pytest.raises(SettingError, match="reward.path: key=K"):
        Endpoint(address, 30.0)
