"""The quickstart: its task, its policy, its command line, and that it learns."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from support.closing import at_end
from support.policies import STORIES, tiny_policy
from support.polling import wait_for
from transformers import AutoModelForCausalLM, AutoTokenizer

import headrace
from headrace.launch.config.checks import trackers
from headrace.launch.config.load import read_recipe
from headrace.launch.recipes import sort_digits
from headrace.launch.recipes.parts import CALCULATOR, RECIPE, TASKS, missing_parts
from headrace.launch.recipes.tiny_policy import build_policy
from headrace.launch.run import quickstart as main
from headrace.rollout.generators.vllm_engine import package

PATIENCE_S = 240.0


def test_a_right_answer_earns_one_and_a_swapped_one_nothing():
    prompts, answers = ["5311:"] * 3, ["#1135"] * 3
    completions = ["#1135", "#1153", "#11355"]
    assert sort_digits.reward(prompts, completions, [[]] * 3, answer=answers, num_digits=[4] * 3) == [1.0, 0.0, 0.0]
    assert sort_digits.answer(prompts[0]) == answers[0]


def test_demonstrations_are_permutations_and_mostly_wrong():
    random = Random(0)
    prompts = [sort_digits.draw_prompt(random) for _ in range(500)]
    shown = [sort_digits.demonstrate(prompt, random) for prompt in prompts]
    assert all(sorted(response[1:]) == sorted(prompt[:-1]) for prompt, response in zip(prompts, shown, strict=True))
    num_right = sum(response == sort_digits.answer(prompt) for prompt, response in zip(prompts, shown, strict=True))
    assert 0.05 < num_right / len(prompts) < 0.4


def test_response_lengths_have_a_tail():
    random = Random(0)
    lengths = sorted(len(sort_digits.draw_prompt(random)) for _ in range(2000))
    assert lengths[len(lengths) * 99 // 100] >= 2.5 * lengths[len(lengths) // 2]


def test_data_is_the_same_for_a_seed_and_another_for_another(tmp_path: Path):
    texts = []
    for number, seed in enumerate((0, 0, 1)):
        sort_digits.write_data(tmp_path / str(number), 50, seed)
        texts.append((tmp_path / str(number)).read_text())
    assert texts[0] == texts[1] != texts[2]
    row = json.loads(texts[0].splitlines()[0])
    assert row["answer"] == sort_digits.answer(row["prompt"]) and row["num_digits"] == len(row["prompt"]) - 1


def test_a_built_policy_loads_and_its_tokenizer_restores_every_text(tmp_path: Path):
    def example(random: Random) -> tuple[str, str]:
        prompt = sort_digits.draw_prompt(random)
        return prompt, sort_digits.answer(prompt)

    first = build_policy(tmp_path / "first", sort_digits.CHARACTERS, example, seed=3, num_steps=1)
    last = build_policy(tmp_path / "last", sort_digits.CHARACTERS, example, seed=3, num_steps=40)
    assert last < 0.9 * first
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "last")
    text = "5311:#1135"
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eos_token_id], skip_special_tokens=True) == text
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    with torch.no_grad():
        assert model(torch.tensor([tokenizer.encode(text)])).logits.shape == (1, len(text), len(tokenizer))


def test_two_quickstarts_that_make_the_same_policy_at_once_keep_the_first_one(tmp_path: Path) -> None:
    folder = tmp_path / "policy"

    def example(random: Random) -> tuple[str, str]:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("the other's")
        return sort_digits.draw_prompt(random), "1"

    build_policy(folder, sort_digits.CHARACTERS, example, seed=0, num_steps=1)

    assert (folder / "config.json").read_text() == "the other's"
    assert list(tmp_path.iterdir()) == [folder]


def test_the_parts_that_a_user_names_are_not_made(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = read_recipe(RECIPE, ["model.path=m", "data.path=d", "reward.path=r.py:f"])
    assert missing_parts(recipe) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "functions"),
    [
        ([], ["reward.path", "environment.tools"]),
        (["environment.tools=[mine.py:tool]"], ["reward.path"]),
        (["environment.path=mine.py:Room"], ["reward.path"]),
        (["environment.path=serve", "rollout.serve=0"], []),
    ],
)
def test_tools_that_a_user_names_take_the_place_of_the_tasks(words: list[str], functions: list[str]):
    parts = missing_parts(read_recipe(CALCULATOR, words), TASKS[CALCULATOR], makes=())
    assert [part.partition("=")[0] for part in parts] == ["model.path", "data.path", *functions]


def test_a_dry_run_names_the_missing_parts_and_makes_none(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--dry-run", "--settings", "run.seed=7"]) == 0
    assert "path: runs/quickstart-policy/seed-7/policy" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_files_own_path_is_as_good_as_the_name(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linked").symlink_to(RECIPE.parent)
    for path in (RECIPE, "linked/quickstart.yaml", Path(headrace.__file__).parent / "launch/recipes/quickstart.yaml"):
        assert main([str(path), "--dry-run", "--settings"]) == 0
        assert "path: runs/quickstart-policy/seed-0/policy" in capsys.readouterr().out


def test_with_a_users_policy_prompts_are_made_but_the_reward_must_be_named(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("r.py").write_text("def f(completions):\n    return [0.0] * len(completions)\n")
    assert main(["--dry-run", "--settings", f"model.path={tiny_policy(tmp_path)}", "reward.path=r.py:f"]) == 0
    assert "path: runs/quickstart-policy/seed-0/openings.jsonl" in capsys.readouterr().out
    assert main(["--dry-run", "model.path=nowhere", "reward.path=r.py:f"]) == 2
    assert "model.path: nowhere does not exist" in capsys.readouterr().err
    assert main([f"model.path={tmp_path}", "run.dir=run"]) == 2
    assert "reward.path is not set" in capsys.readouterr().err


def test_a_quickstart_leaves_the_data_that_another_one_reads(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "runs" / "quickstart-policy" / "seed-0"
    (home / "policy").mkdir(parents=True)
    missing_parts(read_recipe(RECIPE))
    with (home / "prompts.jsonl").open() as rows:
        missing_parts(read_recipe(RECIPE))
        assert os.fstat(rows.fileno()).st_nlink == 0, "the file was written over"
    assert sorted(path.name for path in home.iterdir()) == ["policy", "prompts.jsonl"]


def test_the_quickstart_reports_a_mistake_like_the_program(capsys):
    assert main(["run.stpes=3"]) == 2
    assert capsys.readouterr().err == "headrace: error: unknown setting 'run.stpes'; the nearest is 'run.steps'\n"


def test_a_tracker_without_its_package_is_refused_before_a_policy_is_made(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    assert main(["run.report_to=[wandb]"]) == 2
    assert (
        "error: run.report_to=wandb: the package wandb is not installed; pip install wandb" in capsys.readouterr().err
    )
    assert not any(tmp_path.iterdir())


def test_an_engine_without_its_package_is_refused_before_a_policy_is_made(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(package, "_installed", lambda _: "")
    assert main(["rollout.engine=vllm"]) == 2
    assert "error: rollout.engine=vllm: vLLM is not installed here; install vllm 0.32" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def quickstart(folder: Path, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "headrace", "quickstart", *words]
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True)
    at_end(lambda: process.wait(PATIENCE_S))
    at_end(process.kill)
    return process


def metrics(run: Path) -> list[dict]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_learns(tmp_path: Path, seed: int):
    process = quickstart(tmp_path, f"run.seed={seed}", "run.dir=run")
    assert process.wait(timeout=1500) == 0
    rewards = [row["reward/mean"] for row in metrics(tmp_path / "run")]
    tenth = max(3, len(rewards) // 10)
    assert sum(rewards[-tenth:]) / tenth - sum(rewards[:tenth]) / tenth >= 0.3
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accounting"]["holds"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / summary["export"]).num_parameters() > 0


@pytest.mark.slow
def test_the_quickstart_command_trains_a_real_checkpoint(tmp_path: Path):
    (tmp_path / "rewards.py").write_text(
        "def count_she(prompts, completions, completion_ids, **columns):\n"
        "    return [min(completion.lower().count('she'), 5) / 5 for completion in completions]\n"
    )
    process = quickstart(
        tmp_path, f"model.path={STORIES}", "reward.path=rewards.py:count_she",
        "run.dir=run", "run.steps=60",
    )  # fmt: skip
    assert process.wait(timeout=800) == 0
    rewards = [row["reward/mean"] for row in metrics(tmp_path / "run")]
    assert sum(rewards[-6:]) / 6 > sum(rewards[:6]) / 6 + 0.3


@pytest.mark.slow
def test_ctrl_c_ends_the_quickstart_in_order(tmp_path: Path):
    (tmp_path / "runs/quickstart-policy/seed-0").mkdir(parents=True)
    build_policy(
        tmp_path / "runs/quickstart-policy/seed-0/policy",
        sort_digits.CHARACTERS, lambda random: ("12:", "#12"), seed=0, num_steps=1,
    )  # fmt: skip
    process = quickstart(tmp_path, "run.dir=run", "run.steps=100000")
    has_trained = lambda: len(metrics(tmp_path / "run")) >= 2
    wait_for(has_trained, lambda: process.poll() is None, lambda: "see its output", patience_s=PATIENCE_S)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["accounting"]["holds"]) == ("interrupted", True)


def test_a_quickstart_that_does_not_exist_names_those_that_do(capsys):
    assert main(["calculater"]) == 2
    assert (
        capsys.readouterr().err
        == "headrace: error: no recipe 'calculater': the nearest is calculator; `headrace run --list` says what each does\n"
    )
