"""Checks of `eval.*`: a mistake names its setting before any process starts."""

from pathlib import Path

import pytest

from headrace.comm.errors import SettingError
from headrace.comm.recipe import DataSettings, EvalSettings
from headrace.launch.config.checks.evaluation import check_best_of_steps, check_evaluation, checkpoint_lines
from headrace.launch.config.load import read_recipe
from headrace.relay.queue.evaluation_prompts import EvaluationPrompts, evaluation_data, evaluation_names

NEVER = ["checkpoint.every=0"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "easy.jsonl"
    path.write_text('{"prompt": "1 + 1"}\n{"prompt": "2 + 2"}\n')
    return path


def test_the_prompts_of_each_file_are_read(prompts: Path):
    ((settings, found),) = check_evaluation(read_recipe(None, [f"eval.path={prompts}"]))
    assert settings.path == str(prompts) and found.prompts == ["1 + 1", "2 + 2"]
    assert not check_evaluation(read_recipe(None, [f"eval.path={prompts}", "eval.every=0"]))


@pytest.mark.parametrize(("most", "num"), [(None, 2), (1, 1), (9, 2)])
def test_the_first_prompts_of_each_file_are_taken(most: int | None, num: int):
    prompts = EvaluationPrompts({"easy": [b"1", b"2"]}, EvalSettings(max_prompts=most), num_steps=1)
    assert prompts.num_prompts == {"easy": num}


def test_a_data_set_of_an_evaluation_has_a_split_of_its_own():
    found = evaluation_data(DataSettings(split="train"), EvalSettings(path="owner/name", split="validation"))
    assert [settings.split for settings in found.values()] == ["validation"]


def test_sets_of_a_python_file_are_named_by_what_is_behind_the_colon():
    easy, hard, other = "tasks/legs.py:Easy", "tasks/legs.py:Hard", "gsm8k/test.jsonl"
    assert evaluation_names(EvalSettings(path=(easy, hard, other))) == {"Easy": easy, "Hard": hard, "test": other}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval.path=none.jsonl"], r"eval\.path: none\.jsonl does not exist"),
        (["eval.path=[{0},sub/easy.jsonl]"], r"eval\.path: .* would both be eval/easy/"),
        (["eval.path=[gcd.py:Test,legs.py:Test]"], r"eval\.path: gcd\.py:Test and .* would both be eval/Test/"),
        (["eval.path=none.py:Test"], r"eval\.path: none\.py does not exist"),
        (["eval.path={0}", "eval.samples=4"], r"eval\.samples=4: greedy"),
        (["eval.path={0}", "eval.temperature=1e-9"], r"eval\.temperature"),
        (["checkpoint.best=eval/easy/avg@1", "checkpoint.every=50"], r"checkpoint\.best=.*: nothing is evaluated"),
        (
            ["eval.path={0}", "checkpoint.best=eval/hard/avg@1", "checkpoint.every=50"],
            r"checkpoint\.best=.*: the metrics of an evaluation are eval/easy/avg@1",
        ),
        (["eval.path={0}", "checkpoint.best=eval/easy/avg@1", "checkpoint.every=20"], r"multiple of eval\.every"),
        (
            ["checkpoint.best=reward/mean", *NEVER],
            r"checkpoint\.best=reward/mean: there is nothing to choose from; set checkpoint\.every",
        ),
    ],
)
def test_a_mistake_names_the_setting(prompts: Path, words: list[str], message: str):
    with pytest.raises(SettingError, match=message):
        check_evaluation(read_recipe(None, [word.format(prompts) for word in words]))


@pytest.mark.parametrize(
    ("words", "is_warned"),
    [
        (["checkpoint.best=reward/mean"], True),
        (["checkpoint.best=reward/mean", "checkpoint.every=10"], False),
        (["checkpoint.best=eval/easy/avg@1"], False),
        ([], False),
    ],
)
def test_a_best_step_that_has_a_checkpoint_only_by_chance_is_a_warning(words: list[str], is_warned: bool):
    warnings = check_best_of_steps(read_recipe(None, words).checkpoint)
    assert ["checkpoint.best=reward/mean" in each and "set checkpoint.every" in each for each in warnings] == (
        [True] if is_warned else []
    )


@pytest.mark.parametrize(
    ("words", "num"),
    [
        (["checkpoint.best=eval/easy/avg@1", "eval.every=5"], 1),
        (["checkpoint.best=eval/easy/avg@1", "eval.every=5", "checkpoint.every=10"], 0),
        (["checkpoint.best=reward/mean", "eval.every=5"], 0),
        (["eval.every=5"], 0),
    ],
)
def test_checkpoints_that_an_evaluation_needs_are_announced(words: list[str], num: int):
    line = "a checkpoint every 5 steps, for checkpoint.best=eval/easy/avg@1 (checkpoint.every=null)"
    assert checkpoint_lines(read_recipe(None, words)) == [line] * num


def test_a_row_without_a_prompt_names_its_file(prompts: Path):
    prompts.write_text('{"question": "1 + 1"}\n')
    with pytest.raises(SettingError, match=r"eval\.path: .*easy\.jsonl:1 has no `prompt`"):
        check_evaluation(read_recipe(None, [f"eval.path={prompts}"]))
