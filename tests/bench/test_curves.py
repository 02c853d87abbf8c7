"""Learning curves: what is kept of a run, how held-out prompts are answered, and the tables that are made of it."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from bench import curves
from bench.curve_report import Cell, Curve, Point, read_curves, seconds_to, write_report
from bench.curves import PLAN, SIDES, TASKS, peer_settings
from bench.held_out import Answer, evaluate
from bench.recipes import two_calls
from support.source_tree import ROOT

from headrace.launch.config.load import read_recipe
from headrace.launch.recipes.tiny_policy import character_tokenizer
from headrace.rollout.environments.tools import ToolEnvironment
from headrace.rollout.rewards.ready import marked

STORIES = ROOT / "tests" / "assets" / "stories260k"
CELL = Cell("addition", "headrace", 2e-5, 0, 4)


def keep(folder: Path, cell: Cell, accuracy: dict[int, float]) -> None:
    """A run of four steps of ten seconds; the reward of step n is n / 4."""
    header = {"task": cell.task, "side": cell.side, "lr": cell.lr, "seed": cell.seed, "steps": cell.steps}
    steps = [{"step": n, "seconds": 20.0 + 10 * n, "reward": n / 4, "staleness": 1.0} for n in range(1, 5)]
    held_out = [{"step": step, "held_out": {"score": value}} for step, value in accuracy.items()]
    lines = [header, *steps, {"end": 0, "busy": 0.95, "own": 0.9}, *held_out]
    (folder / cell.file_name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def cells_of(text: str, side: str) -> list[str]:
    """The columns of a side's row."""
    (row,) = re.findall(rf"^\| ({side} \|.*) \|$", text, re.MULTILINE)
    return [column.strip() for column in row.split("|")]


def test_a_page_has_the_figures_of_kept_runs_and_says_which_are_to_be_measured(tmp_path: Path):
    keep(tmp_path, CELL, {0: 0.2, 2: 0.6, 4: 0.9})
    page = tmp_path / "results.md"
    page.write_text("before\n<!-- addition -->\nold\n<!-- /addition -->\nafter\n")
    write_report([CELL, Cell("addition", "trl", 2e-5, 0, 4)], tmp_path, page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    ours, theirs = cells_of(text, "headrace"), cells_of(text, "trl")
    assert ours[3:7] == ["4", "0.200", "0.900", "0.900"]
    # .80 lies two thirds of the way from step 2 (40 s) to step 4 (60 s).
    assert ours[8] == f"{(40 + 20 * 2 / 3) / 60:.1f}" and ours[9] == "not reached" and ours[10] == "10.0"
    assert theirs[4] == "to be measured" and not any(theirs[5:])
    assert (tmp_path / "addition.svg").stat().st_size > 1000


def test_the_same_runs_make_the_same_bytes(tmp_path: Path):
    page = tmp_path / "results.md"
    page.write_text("<!-- addition -->\n<!-- /addition -->\n")
    keep(tmp_path, CELL, {0: 0.2, 4: 0.9})
    made = []
    for _ in range(2):
        write_report([CELL], tmp_path, page)
        made.append((page.read_bytes(), (tmp_path / "addition.svg").read_bytes()))
    assert made[0] == made[1]


def test_a_kept_run_outside_the_plan_is_shown_too(tmp_path: Path):
    other = Cell("addition", "sync", 1e-5, 3, 4)
    keep(tmp_path, other, {})
    found = read_curves([CELL], tmp_path)
    assert list(found) == [CELL, other] and found[CELL] is None


def test_a_value_is_reached_where_the_curve_first_crosses_it():
    points = [Point(0, 0.1), Point(10, 0.9), Point(20, 0.5), Point(30, 1.0)]
    assert seconds_to(points, 0.5) == pytest.approx(5)
    assert seconds_to(points[:2], 0.95) is None
    assert seconds_to([Point(3, 0.9)], 0.8) == 3
    assert seconds_to([], 0.8) is None


def test_the_reward_of_a_curve_is_a_mean_of_three_steps(tmp_path: Path):
    keep(tmp_path, CELL, {})
    curve = Curve((tmp_path / CELL.file_name).read_text())
    assert curve.rewards() == [Point(50, 0.5), Point(60, 0.75)]


def test_each_planned_run_is_of_a_known_task_and_side_and_has_a_file_of_its_own():
    assert {cell.task for cell in PLAN} <= {*TASKS} and {cell.side for cell in PLAN} <= {*SIDES}
    assert len({cell.file_name for cell in PLAN}) == len(PLAN)


@pytest.mark.parametrize("task", TASKS)
def test_the_recipe_of_each_task_takes_its_settings(task: str):
    recipe = read_recipe(TASKS[task].recipe, TASKS[task].words)
    assert recipe.reward.functions


def test_the_peer_gets_the_settings_of_the_recipe(tmp_path: Path):
    words = ["optimizer.warmup_steps=7", "optimizer.beta2=0.9", "sampling.max_new_tokens=9", "checkpoint.every=3"]
    recipe = read_recipe(
        ROOT / "launch" / "recipes" / "smollm2.yaml", [*words, "batch.prompts_per_step=16", "model.dtype=bfloat16"]
    )
    given = peer_settings(Cell("addition", "trl", 3e-5, 5, 40), tmp_path, recipe)
    assert given["learning_rate"] == 3e-5 and given["seed"] == 5 and given["max_steps"] == 40
    assert given["warmup_steps"] == 7 and given["adam_beta2"] == 0.9 and given["max_completion_length"] == 9
    assert given["save_steps"] == 3 and given["bf16"] is True
    per_step = given["per_device_train_batch_size"], given["gradient_accumulation_steps"]
    assert per_step[0] * per_step[1] == 16 * recipe.batch.samples_per_prompt  # pyright: ignore[reportOperatorIssue]


def test_a_call_of_a_held_out_answer_gets_its_result_and_the_answer_ends_without_a_call():
    tokenizer = character_tokenizer("0123456789*+<>/acelrstu")
    recipe = read_recipe(None, ["environment.max_turns=4", "sampling.max_new_tokens=100"])

    async def answered() -> str:
        environment = ToolEnvironment([two_calls.calc])
        await environment.reset(prompt="12*7+5=")
        answer = Answer({"prompt": "12*7+5="}, [1], environment)
        for turn in ("<calc>12*7</calc>", "<calc>84+5</calc>", "89"):
            assert not answer.is_done
            await answer.take(tokenizer(turn, add_special_tokens=False)["input_ids"], turn, recipe, tokenizer)
        assert answer.is_done
        return str(tokenizer.decode(answer.token_ids)).replace(" ", "")

    text = asyncio.run(answered())
    assert text == "<calc>12*7</calc><result>84</result><calc>84+5</calc><result>89</result>89"
    assert two_calls.score(text, "89") == 1.0 and two_calls.calls(text) == 2.0


def test_held_out_answers_are_greedy_and_scored_by_each_reward_function(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "Once upon a time", "wanted": 6}\n{"prompt": "One day", "wanted": 3}\n'
    )
    (tmp_path / "rewards.py").write_text(
        "def size(completion_ids, wanted):\n    return [float(len(i) == 6) + w for i, w in zip(completion_ids, wanted)]\n\n\n"
        "def text(solution_str):\n    return float(hash(solution_str) % 1000)\n"
    )
    words = [f"model.path={STORIES}", f"data.path={tmp_path}/rows.jsonl", "sampling.max_new_tokens=6"]
    recipe = read_recipe(None, [*words, f"reward.path=[{tmp_path}/rewards.py:size,{tmp_path}/rewards.py:text]"])
    means = evaluate(recipe, STORIES)
    assert means["size"] == 1 + 4.5 and means == evaluate(recipe, STORIES)


def test_the_task_of_two_calls_is_solved_by_its_demonstrations_alone(tmp_path: Path):
    two_calls.write_data(tmp_path, 1)
    rows = {name: (tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("prompts", "held-out")}
    prompts = {name: {json.loads(row)["prompt"] for row in found} for name, found in rows.items()}
    assert len(prompts["held-out"]) == two_calls.HELD_OUT and not prompts["held-out"] & prompts["prompts"]
    product, total = two_calls.calc("34*12"), two_calls.calc("408+25")
    assert (product, total) == ("408", "433") and two_calls.calc("34*12+25") == two_calls.calc("1**2") == ""
    right = f"<calc>34*12</calc><result>{product}</result><calc>408+25</calc><result>{total}</result>{total}"
    assert two_calls.score(right, "433") == 1.0 and two_calls.score(right, "408") == 0.0


def test_an_answer_is_marked_if_its_last_line_alone_has_the_mark_and_a_number():
    good = ("So it is 72.\n#### 72", "#### 1,000", "a\n#### -3.5")
    bad = ("72", "#### 72\nor so", "#### seven", "#### 7\n#### 8", "")
    assert [marked(text) for text in good] == [1.0] * len(good)
    assert [marked(text) for text in bad] == [0.0] * len(bad)


def test_a_run_that_needs_another_argument_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    common = ["--policy", str(STORIES), "--keep", str(tmp_path)]
    assert curves.main(["run", "gsm8k", "headrace", *common]) == 2
    assert "--data" in capfd.readouterr().err
    assert curves.main(["run", "addition", "trl", *common]) == 2
    assert "--trl-python" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_keeps_its_steps_and_the_accuracy_of_its_weights(tmp_path: Path):
    template = 'data.chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"'
    words = ["run", "addition", "headrace", "--steps", "6", "--policy", str(STORIES), "--keep", str(tmp_path)]
    for word in (template, "batch.prompts_per_step=4", "batch.samples_per_prompt=4"):
        words += ["--set", word]
    assert curves.main(words) == 0
    (path,) = tmp_path.iterdir()
    curve = Curve(path.read_text())
    assert [step["step"] for step in curve.steps] == [1, 2, 3, 4, 5, 6] and curve.end["end"] == 0
    assert sorted(curve.held_out) == [0, 5, 6]
