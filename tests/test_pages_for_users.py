"""The claims of the pages for users are true of the program: its messages, its names, its settings."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.source_tree import ROOT, SOURCES, texts

import headrace
from headrace.comm.errors import SettingError
from headrace.launch.config.help import page as help_page
from headrace.launch.config.load import known_settings, read_recipe
from headrace.launch.python.keywords import dotted_settings
from headrace.trainer.policy.supported import check_supported

USE = ROOT / "docs" / "use"
ROW = re.compile(r"^\| (?!you see|---)(.+?) \|", re.MULTILINE)
QUOTED = re.compile(r"`([^`]+)`")


def quoted_messages() -> Iterator[str]:
    """The messages in the first column of the tables, which have a space; names of settings and metrics have none."""
    page = (USE / "troubleshooting.md").read_text()
    return (text for cell in ROW.findall(page) for text in QUOTED.findall(cell) if " " in text)


def fragments(message: str) -> list[str]:
    return [part for part in (piece.strip(" ;:,") for piece in message.split("...")) if part]


@pytest.mark.parametrize("message", [*quoted_messages()])
def test_a_message_that_the_troubleshooting_quotes_is_one_of_the_programs(message: str):
    """All of its fixed parts are in the texts of one file."""
    parts = fragments(message)
    assert parts and any(all(any(part in text for text in texts(path)) for part in parts) for path in SOURCES), parts


NAMES = re.compile(r"^\| `([\w.]+)` \| `([\w.]+)` \| (accepted|answered) \|", re.MULTILINE)
ANSWERS = re.compile(r"^\| `([\w.]+)` \| ([^`|]+) \|$", re.MULTILINE)
METRICS = re.compile(r"^\| (?:TRL|verl)'s metric \| here \|\n\|---\|---\|\n((?:\|.+\n)+)", re.MULTILINE)
PEERS = ("from-trl", "from-verl")


def found_in(pages: tuple[str, ...], pattern: re.Pattern[str]) -> list[tuple[str, ...]]:
    return [match for page in pages for match in pattern.findall((USE / f"{page}.md").read_text())]


def answer_to(name: str) -> str:
    """The message of the command line about another trainer's setting."""
    with pytest.raises(SettingError) as told:
        read_recipe(None, [f"{name}=8"])
    return str(told.value)


@pytest.mark.parametrize(("name", "setting", "keyword"), found_in(PEERS, NAMES))
def test_a_name_of_another_trainer_leads_to_the_setting_that_the_page_says(name: str, setting: str, keyword: str):
    assert setting in known_settings()
    assert setting in answer_to(name)
    assert (setting in dotted_settings({name: 8})) == (keyword == "accepted")


def test_the_pages_for_users_of_other_trainers_answer_their_habits():
    assert all(len(found_in((page,), NAMES)) >= 40 for page in PEERS)


@pytest.mark.parametrize(("name", "answer"), found_in(PEERS, ANSWERS))
def test_a_name_without_a_setting_here_is_answered_as_the_page_says(name: str, answer: str):
    assert answer_to(name) == f"unknown setting {name!r}; {answer}"


@pytest.mark.parametrize("page", PEERS)
def test_the_metrics_beside_those_of_another_trainer_are_ours(page: str):
    (table,) = METRICS.findall((USE / f"{page}.md").read_text())
    ours = [name for row in table.splitlines() for name in QUOTED.findall(row.split("|")[2]) if "NAME" not in name]
    known = {text for path in SOURCES for text in texts(path)}
    assert len(ours) > 8
    assert not [name for name in ours if name not in known and f"{name.rpartition('/')[0]}/..." not in known]


def test_the_page_of_all_settings_is_the_one_that_the_program_prints():
    """After a change of the recipe: python -m headrace.launch.config.help > docs/use/configuration.md"""
    assert (USE / "configuration.md").read_text() == help_page()


@pytest.mark.parametrize("model_type", ["rwkv", "mamba", "qwen2_vl", "llava"])
def test_a_model_of_a_kind_that_is_left_out_is_refused_by_its_type(model_type: str):
    with pytest.raises(SettingError, match=f"model.path: model type '{model_type}' is not supported"):
        check_supported(SimpleNamespace(model_type=model_type))


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "mxfp4"])
def test_a_model_with_quantized_weights_is_refused_with_their_kind(method: str):
    config = SimpleNamespace(model_type="llama", quantization_config={"quant_method": method})
    with pytest.raises(SettingError, match=rf"model.path: llama with quantized weights .* {method}"):
        check_supported(config)


def test_every_page_is_linked_by_the_list_of_pages():
    linked = re.findall(r"\]\(use/([\w-]+)\.md\)", (ROOT / "docs" / "README.md").read_text())
    assert {*linked} == {page.stem for page in USE.glob("*.md")}
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()


def run_example(page: str, start: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings that the example of a page gives to `headrace.train`."""
    (example,) = re.findall(rf"```python\n({start}.*?)```", (USE / f"{page}.md").read_text(), re.DOTALL)
    given: dict[str, Any] = {}

    def train(*_: str, **settings: Any) -> SimpleNamespace:
        given.update(settings)
        return SimpleNamespace(summary={"status": "interrupted", "evaluations": []})

    monkeypatch.setattr(headrace, "train", train)
    exec(example, {})  # noqa: S102 - the page's own
    return given


def test_the_function_that_stops_early_does_so_after_three_evaluations_without_a_new_best(
    monkeypatch: pytest.MonkeyPatch,
):
    given = run_example("evaluation", "import headrace\n\nbest = ", monkeypatch)
    stop = given.pop("on_step")
    settings = {name: value for name, value in given.items() if name not in ("eval", "steps")}
    assert {*dotted_settings(settings)} <= known_settings().keys()
    scores = [None, 0.1, 0.3, None, 0.2, 0.3, None, 0.4, 0.4, 0.1, None, 0.2]
    ends = [stop({} if score is None else {"eval/held_out/avg@1": score}) for score in scores]
    assert ends == [False] * 11 + [True]


def test_the_function_that_gets_the_metrics_of_a_step_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    log = run_example("trackers", "import headrace\n", monkeypatch)["on_step"]
    assert log({"step": 3, "reward/mean": 0.5, "staleness/hist": {"1": 4}}) is None
    assert capsys.readouterr().out == "0.5\n"


def test_the_pages_answer_usual_wishes_with_a_link_each():
    _, _, table = (ROOT / "docs" / "README.md").read_text().partition("| I want to | read |\n|---|---|\n")
    rows = table.partition("\n\n")[0].splitlines()
    assert len(rows) >= 20 and all("](use/" in row for row in rows)
