"""A line of `samples.jsonl` says who wrote what, how it ended and what was trained, and the console's form of it obeys nothing."""

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from support.actors import recipe_of
from support.policies import tiny_policy

from headrace.comm.messages import GroupId
from headrace.comm.messages.queue import RowRef
from headrace.comm.recipe import Recipe
from headrace.trainer.policy.model import load_tokenizer
from headrace.trainer.record.metrics_log import MetricsLog
from headrace.trainer.record.sample_lines import SampleLines, in_short, two_of
from headrace.trainer.record.samples_log import SamplesLog
from headrace.trainer.record.shown_rows import Sample


@dataclass
class Scene:
    """A policy whose tokens are characters."""

    folder: Path
    tokenizer: Any

    def recipe(self, **settings: object) -> Recipe:
        return recipe_of(self.folder, **settings)

    def sample(self, *pieces: str, **fields: Any) -> Sample:
        """A response of pieces, of which the policy has drawn every second one, from the first one on."""
        ids = [self.tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
        response = [token for part in ids for token in part]
        mask = [(index + 1) % 2 for index, part in enumerate(ids) for _ in part]
        row = RowRef(GroupId(1, 7).row(3), 1, ["relay-0#1"], 4, 9, 0.25)
        given = {
            "place": 0, "row": row, "prompt_ids": self.tokenizer.encode("2*3="), "response_ids": response,
            "from_policy": mask, "versions": [4] * len(mask), "logprobs": [-0.1 * on for on in mask], "is_cut": False,
            "info": b'{"metrics":{"calls":2.0,"right":0.25,"right/key":1.0},"extra":{"note":"x"}}',
            "num_trained": sum(mask), "advantage": 0.5, "advantages": [0.5] * len(mask), "trainer_logprobs": [-0.2] * len(mask),
        }  # fmt: skip
        return Sample(**given | fields)

    def line(self, sample: Sample, **settings: object) -> dict[str, Any]:
        fields = SampleLines(self.recipe(**settings), self.tokenizer).fields(5, sample)
        return json.loads(msgspec.json.encode(fields))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tiny_policy(tmp_path_factory.mktemp("policy"), "llama")
    return Scene(folder, load_tokenizer(folder))


TEXT_TOOLS: dict[str, Any] = {"environment.tools": "[tools.py:calc, tools.py:look]", "reward.path": "r.py:right"}


def test_turns_have_the_calls_of_tools_with_their_results(scene: Scene):
    sample = scene.sample(
        "so <calc>2*3</calc>", "<result>6</result>", "<look>x</look>", '<result>{"error": "KeyError"}</result>', "6"
    )
    line = scene.line(sample, **TEXT_TOOLS)
    assert (line["num_turns"], line["num_calls"], line["num_failed_calls"]) == (3, 2, 1)
    assert [(turn["by"], turn["text"]) for turn in line["turns"]][1:3] == [
        ("environment", "<result>6</result>"),
        ("policy", "<look>x</look>"),
    ]
    calls = [call for turn in line["turns"] for call in turn.get("calls", ())]
    assert calls == [
        {"name": "calc", "arguments": ["2*3"], "result": "6", "failed": False},
        {"name": "look", "arguments": ["x"], "result": '{"error": "KeyError"}', "failed": True},
    ]
    for turn in line["turns"]:
        assert "".join(line["tokens"]["texts"][turn["start"] : turn["end"]]) == turn["text"]
        own = turn["by"] == "policy"
        numbers = line["tokens"]["generator"][turn["start"] : turn["end"]]
        assert all((number is not None) == own for number in numbers), "nothing was drawn where the environment wrote"


def test_calls_of_a_chat_are_read_in_whatever_frame_the_template_puts_their_results(scene: Scene):
    call = '<tool_call>{"name": "calc", "arguments": {"e": "2*3"}}</tool_call>'
    broken = "<tool_call>{calc}</tool_call>"
    framed = "<tool_response>6</tool_response><tool_response>no</tool_response>"
    line = scene.line(
        scene.sample(call + broken, framed, call, '[tool] {"error": "no"} [assistant]', call), **TEXT_TOOLS
    )
    found = [(call["name"], call["result"], call["failed"]) for turn in line["turns"] for call in turn.get("calls", ())]
    assert found == [
        ("calc", "6", False),
        ("", "no", True),
        ("calc", '[tool] {"error": "no"} [assistant]', True),
        ("calc", None, False),
    ]


def test_halves_of_characters_that_a_model_wrote_into_a_call_are_replaced(scene: Scene):
    call = '<tool_call>{"name": "a\\ud83d", "arguments": {"\\ud83d": ["\\ud83d"]}}</tool_call>'
    line = scene.line(scene.sample(call, "6", "6"), **TEXT_TOOLS)
    assert line["turns"][0]["calls"][0] == {"name": "a?", "arguments": {"?": ["?"]}, "result": "6", "failed": False}


def test_calls_are_read_as_the_environment_read_them_without_special_tokens_and_none_is_read_of_a_cut_turn(
    scene: Scene,
):
    hermes = '<tool_call>{"name": "calc", "arguments": {}}</s>'
    line = scene.line(scene.sample(hermes, "6", "<calc>2+3</s>", "<result>5</result>", "<calc>7"), **TEXT_TOOLS)
    calls = [call for turn in line["turns"] for call in turn.get("calls", ())]
    assert [(call["name"], call["arguments"], call["failed"]) for call in calls] == [
        ("calc", {}, False), ("calc", ["2+3"], False), ("calc", ["7"], False),
    ]  # fmt: skip
    cut = scene.line(scene.sample(hermes, "6", '<tool_call>{"na', is_cut=True), **TEXT_TOOLS)
    assert (cut["num_calls"], cut["num_failed_calls"]) == (1, 0)


def test_tags_in_the_text_of_an_environment_are_no_calls_unless_results_follow(scene: Scene):
    settings: dict[str, Any] = {"environment.path": "games.py:Game"}
    line = scene.line(
        scene.sample("<b>go</b>", "you went", "<think>so</think><calc>1</calc>", "<result>1</result>"), **settings
    )
    assert [len(turn.get("calls", ())) for turn in line["turns"]] == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("text", "fields", "settings", "finish"),
    [
        ("6", {"is_cut": True}, {}, "cut"),
        ("6</s>", {}, {}, "ended"),
        ("6 END", {}, {"sampling.stop": "[END]"}, "stop string"),
        ("6</s>", {}, {"sampling.stop": "[END]"}, "ended"),
    ],
)
def test_a_line_says_how_the_response_ended(scene: Scene, text: str, fields: Any, settings: Any, finish: str):
    assert scene.line(scene.sample(text, **fields), **settings)["finish"] == finish


def test_a_line_has_the_parts_of_the_reward_the_version_and_what_was_trained(scene: Scene):
    line = scene.line(scene.sample("abc", num_trained=2), **TEXT_TOOLS)
    assert (line["step"], line["group"], line["sample"]) == (6, "1.7", 3)
    assert (line["reward"], line["rewards"]) == (0.25, {"right": 0.25})
    assert (line["metrics"], line["notes"]) == ({"calls": 2.0, "right/key": 1.0}, {"note": "x"})
    assert (line["versions"], line["staleness"], line["num_trained"], line["advantage"]) == ([4], 1, 2, 0.5)
    assert line["tokens"]["ratio"] == pytest.approx([0.9048374] * 3, rel=1e-6)
    assert "advantages" not in line["tokens"] and "versions" not in line["tokens"]


def test_tokens_have_their_own_versions_and_advantages_where_these_differ(scene: Scene):
    line = scene.line(scene.sample("abc", versions=[4, 4, 5], advantages=[0.1, 0.2, 0.6], advantage=0.4))
    assert (line["versions"], line["tokens"]["versions"]) == ([4, 5], [4, 4, 5])
    assert line["tokens"]["advantages"] == [0.1, 0.2, 0.6]


def test_what_only_the_learner_knows_is_null_where_it_does_not_say(scene: Scene):
    line = scene.line(scene.sample("abc", num_trained=None, advantage=None, advantages=None, trainer_logprobs=None))
    assert line["advantage"] is line["num_trained"] is None and [*line["tokens"]] == ["ids", "texts", "generator"]
    assert scene.line(scene.sample("abc", logprobs=None))["tokens"] is None


def test_a_number_that_is_not_finite_is_null(scene: Scene):
    line = scene.line(scene.sample("abc", trainer_logprobs=[float("nan"), float("-inf"), -1.0]))
    assert line["tokens"]["trainer"] == [None, None, -1.0] and line["tokens"]["ratio"][0] is None


def test_the_console_shows_the_ends_of_long_texts_and_nothing_that_a_terminal_obeys(scene: Scene):
    line = scene.line(scene.sample("x"), **TEXT_TOOLS) | {
        "response": "\x1b[2J" + "a\n" * 900 + "end\u202e",
        "num_calls": 2,
    }
    text = in_short(line)
    assert "\x1b" not in text and "\u202e" not in text and "\\x1b[2Ja\\na" in text and text.endswith("end\\u202e")
    assert "[... 1,568 characters ...]" in text and text.count("\n") == 2 and len(text) < 1000
    assert "reward 0.250 (right 0.25)  advantage +0.50  staleness 1  1 tokens, ended  tool calls 2 (0 failed)" in text


def test_the_best_and_the_worst_of_a_group_are_shown():
    samples = [{"group": "0.1", "reward": reward} for reward in (0.5, 1.0, 0.0)] + [{"group": "0.2", "reward": 9.0}]
    assert [sample["reward"] for sample in two_of(samples)] == [1.0, 0.0]
    assert two_of(samples[:1]) == samples[:1]


def test_a_console_without_a_character_shows_an_escape(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", console)
    board = cast(MetricsLog, SimpleNamespace(write_text=lambda *_: None))
    log = SamplesLog(scene.recipe(**{"run.dir": scene.folder}), 0, board, lambda: None)
    log._shown = [scene.line(scene.sample("x"), **TEXT_TOOLS) | {"response": "\u00e4"}]
    log.show(0)
    assert b"response  \\xe4" in cast(io.BytesIO, console.buffer).getvalue()
