"""Claims at the front of a run, by plain HTTP."""

import json
from pathlib import Path

import pytest
from support.http_server import serving

from headrace.comm.errors import PeerGone, SettingError
from headrace.launch.agents import claims
from headrace.launch.agents.claims import Claims


def test_a_claim_waits_for_a_sample_and_asks_for_the_same_one_again():
    answers = [(503, {}), (200, {"id": "a"}), (410, {})]
    with serving(lambda number, body: answers[number]) as front:
        front_of = Claims(front.url)
        assert front_of.claim() == {"id": "a"}
        assert front_of.claim() is None, "the run has ended"
    names = [headers["Idempotency-Key"] for headers in front.headers]
    assert names[0] == names[1] != names[2]


def test_an_end_says_why_it_is_refused():
    refusal = {"error": {"message": "the conversation has ended"}}
    with serving(lambda number, body: (410, refusal) if number else (200, {})) as front:
        assert Claims(front.url).end("a", {"reward": 1.0}) == ""
        assert Claims(front.url).end("a", {"reward": 2.0}) == "the run refuses: the conversation has ended (410)"
    assert front.paths == ["/agents/v1/conversations/a/end"] * 2 and front.bodies[0] == {"reward": 1.0}


def test_a_key_of_the_environment_is_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADRACE_API_KEY", "secret-key")
    with serving(lambda number, body: (200, {"id": "a"})) as front:
        Claims(front.url).claim()
    assert front.headers[0]["Authorization"] == "Bearer secret-key"


def test_the_front_is_found_again_at_another_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(claims, "PAUSE_S", 0.01)
    file = tmp_path / "serve.json"
    with serving(lambda number, body: (200, {})) as old:
        file.write_text(json.dumps({"url": old.url}))
    of_run = Claims(str(tmp_path))
    with serving(lambda number, body: (200, {"id": "b"})) as new:
        monkeypatch.setattr(claims.time, "sleep", lambda seconds: file.write_text(json.dumps({"url": new.url})))
        assert of_run.claim() == {"id": "b"}


def test_a_run_that_does_not_answer_and_a_folder_that_is_none_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingError, match="has no serve.json"):
        Claims(str(tmp_path))
    monkeypatch.setattr(claims, "AWAY_S", 0.0)
    monkeypatch.setattr(claims, "PAUSE_S", 0.01)
    with serving(lambda number, body: (200, {})) as gone:
        url = gone.url
    with pytest.raises(PeerGone, match="does not answer for 0 s"):
        Claims(url).claim()
