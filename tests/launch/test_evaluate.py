"""`headrace eval`: what it reads, prints and writes, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from support.policies import tiny_policy

from headrace.comm.errors import SettingError
from headrace.launch.evaluate import main
from headrace.launch.report.evaluation import EvalRequest, evaluate
from headrace.relay.checkpoints import CheckpointFolder
from headrace.rollout.local_evaluation import LocalEvaluation

REWARDS = '''
"""Rewards: the length of a response, an error, and one that never answers."""

import os, time
from pathlib import Path

def length(solution_str):
    return float(len(solution_str))

def broken(solution_str):
    raise ValueError("no such luck")

def silent(solution_str, started):
    Path(started).write_text(str(os.getpid()))
    time.sleep(1000)
'''
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def run(run_dir: Path, policy: Path) -> Path:
    """A run with a checkpoint after 4 steps, whose recipe has an evaluation of two prompts."""
    hf = run_dir / "checkpoints" / "step_4" / "hf"
    copytree(policy, hf)
    CheckpointFolder(run_dir).seal(4)
    (run_dir / "rewards.py").write_text(REWARDS)
    started = str(run_dir / "started")
    rows = [json.dumps({"prompt": prompt, "started": started}) + "\n" for prompt in ("ab", "the cat")]
    (run_dir / "test.jsonl").write_text("".join(rows))
    config = {
        "model": {"path": "gone"},
        "reward": {"path": f"{run_dir / 'rewards.py'}:length"},
        "eval": {"path": str(run_dir / "test.jsonl"), "every": 0},
        "sampling": {"max_new_tokens": 8},
        "checkpoint": {"best": "eval/test/avg@1", "every": 10},
    }
    (run_dir / "config.yaml").write_text(json.dumps(config))
    return run_dir


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_is_evaluated_by_its_own_recipe_and_the_responses_lie_beside_the_checkpoint(run: Path, capfd: Any):
    assert main([str(run)]) == 0
    out = capfd.readouterr().out
    lines = lines_of(run / "checkpoints" / "step_4.evaluation.jsonl")
    mean = sum(line["reward"] for line in lines) / 2
    assert [line["version"] for line in lines] == [4, 4]
    assert {line["name"] for line in lines} == {"test"} and sorted(line["row"] for line in lines) == [0, 1]
    assert all(line["reward"] == len(line["text"]) and line["tokens"] <= 8 for line in lines)
    table = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert float(table["eval/test/avg@1"]) == pytest.approx(mean, rel=1e-3)
    assert table["model"] == f"{run / 'checkpoints' / 'step_4' / 'hf'} (after 4 steps)"
    assert "tokens/s" in table["time"]
    assert "eval/version" not in table


def test_an_existing_file_is_never_written_again(run: Path, capfd: Any):
    first = run / "checkpoints" / "step_4.evaluation.jsonl"
    first.write_text("mine\n")
    assert main([str(run / "checkpoints" / "step_4"), "eval.max_prompts=1"]) == 0
    assert first.read_text() == "mine\n"
    second = run / "checkpoints" / "step_4.evaluation-2.jsonl"
    assert len(lines_of(second)) == 1
    assert str(second) in capfd.readouterr().out
    assert main([str(run), "--out", str(first)]) == 2
    assert f"--out: {first} exists already" in capfd.readouterr().err


def test_two_evaluations_at_a_time_have_a_file_each_and_neither_removes_that_of_the_other(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
    requests = [EvalRequest.of([str(run)], None) for _ in range(2)]
    turns = LocalEvaluation.turns

    def with_a_second(evaluation: LocalEvaluation) -> Any:
        monkeypatch.setattr(LocalEvaluation, "turns", interrupted)
        with pytest.raises(KeyboardInterrupt):
            evaluate(requests[1])
        return turns(evaluation)

    def interrupted(evaluation: LocalEvaluation) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalEvaluation, "turns", with_a_second)
    assert evaluate(requests[0]) == 0
    assert len(lines_of(run / "checkpoints" / "step_4.evaluation.jsonl")) == 2
    assert not (run / "checkpoints" / "step_4.evaluation-2.jsonl").exists()
    assert capfd.readouterr().err == "headrace: interrupted after 0 of 2 samples\n"
    named = EvalRequest.of([str(run)], str(tmp_path / "out.jsonl"))
    (tmp_path / "out.jsonl").write_text("of another\n")
    with pytest.raises(SettingError, match=r"^--out: .*out.jsonl exists already"):
        evaluate(named)
    assert (tmp_path / "out.jsonl").read_text() == "of another\n"


def test_responses_are_kept_in_a_file_that_is_moved_meanwhile(run: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any):
    file = run / "checkpoints" / "step_4.evaluation.jsonl"
    turns = LocalEvaluation.turns

    def after_a_move(evaluation: LocalEvaluation) -> Any:
        file.rename(run / "mine.jsonl")
        return turns(evaluation)

    monkeypatch.setattr(LocalEvaluation, "turns", after_a_move)
    assert main([str(run)]) == 0
    assert len(lines_of(run / "mine.jsonl")) == 2
    capfd.readouterr()


def test_settings_of_the_command_line_override_those_of_the_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
    monkeypatch.setattr("headrace.launch.report.evaluation.TELL_S", 0.0)
    out = tmp_path / "new.jsonl"
    words = ["eval.samples=2", "eval.temperature=1", "sampling.max_new_tokens=3", f"--out={out}"]
    assert main([str(run), *words]) == 0
    assert sorted((line["row"], line["sample"]) for line in lines_of(out)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(line["tokens"] <= 3 for line in lines_of(out))
    table = capfd.readouterr().out
    assert "eval/test/avg@2" in table and "eval/test/pass@2" in table
    assert "0 of 4 samples done; " in table, "lines tell what it waits for"
    assert re.search(
        r"^4 of 4 samples done, mean reward [\d.]+; 0 in generation, 0 wait for rewards", table, re.MULTILINE
    )


def test_a_model_without_a_run_is_evaluated_by_the_settings_that_are_given(run: Path, policy: Path, capfd: Any):
    words = [f"eval.path={run / 'test.jsonl'}", f"reward.path={run / 'rewards.py'}:length", "sampling.max_new_tokens=2"]
    assert main([str(policy), *words]) == 0
    beside = policy.with_name(f"{policy.name}.evaluation.jsonl")
    assert {line["version"] for line in lines_of(beside)} == {0}
    beside.unlink()
    recipe = run.with_name("recipe.yaml")
    recipe.write_text(f"model: {{path: {json.dumps(str(policy))}}}\n")
    assert main([str(recipe), *words]) == 0, "a recipe names the model that its run begins with"
    beside.unlink()
    capfd.readouterr()


def test_the_responses_lie_in_the_present_folder_where_that_of_the_model_cannot_be_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
    here = tmp_path / "a place"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK or Path(path) != run / "checkpoints")
    assert main([str(run), "eval.max_prompts=1"]) == 0
    assert len(lines_of(here / "step_4.evaluation.jsonl")) == 1
    capfd.readouterr()


MISTAKES = {
    "no such model": (["no/such/model"], "model.path: no/such/model does not exist"),
    "no model": (["eval.samples=2"], "name one model"),
    "two models": (["RUN", "other"], "name one model"),
    "an unknown option": (["RUN", "--output=x"], "unknown option --output, the nearest is --out"),
    "no name of a file": (["RUN", "--out"], "argument --out: expected one argument"),
    "a missing folder": (["RUN", "--out=none/x"], "--out: none is not a folder"),
    "an unknown setting": (["RUN", "eval.sample=2"], "the nearest is 'eval.samples'"),
    "another model": (["RUN", "model.path=x"], "model.path: RUN is the model; leave this out"),
    "no prompts": (["POLICY", "reward.path=gsm8k"], "eval.path is not set"),
    "no reward": (["POLICY", "eval.path=RUN/test.jsonl"], "reward.path is not set"),
    "rewards of agents": (
        ["POLICY", "eval.path=RUN/test.jsonl", "environment.path=serve"],
        "reward.path is not set: agents gave the rewards of this run",
    ),
    "no such prompts": (["RUN", "eval.path=none.jsonl"], "eval.path: none.jsonl does not exist"),
    "equal samples": (["RUN", "eval.samples=2"], "set eval.temperature above 0"),
    "no such function": (["RUN", "reward.path=RUN/rewards.py:size"], "has no function 'size'"),
    "no such column": (["RUN", "reward.path=gsm8k"], "reward.path: gsm8k takes a ground truth"),
    "emulated devices": (["RUN", "rollout.engine=emulated"], "rollout.engine: emulated devices"),
    "a long response": (["RUN", "eval.temperature=1e-9"], "eval.temperature: set 0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_no_file(mistake: str, run: Path, policy: Path, capfd: Any):
    words, message = MISTAKES[mistake]
    given = [word.replace("RUN", str(run)).replace("POLICY", str(policy)) for word in words]
    before = {*run.rglob("*")}
    assert main(given) == 2
    error = capfd.readouterr().err
    assert message.replace("RUN", str(run)) in error and error.count("\n") == 1
    assert error.startswith("headrace: error: ")
    assert {*run.rglob("*")} == before


def test_a_folder_may_have_an_equals_sign_in_its_name(run: Path):
    folder = run.rename(run.with_name("lr=1e-5"))
    request = EvalRequest.of([str(folder), "eval.samples=1"], None)
    assert (request.model.run_dir, request.recipe.eval.samples) == (folder, 1)


def test_files_of_the_recipe_are_those_of_the_folder_where_the_run_was_started(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
    config = json.loads((run / "config.yaml").read_text()) | {"eval": {"path": "test.jsonl"}}
    (run / "config.yaml").write_text(json.dumps(config))
    monkeypatch.chdir(run.parent)
    assert main([str(run)]) == 2
    assert "test.jsonl does not exist; the run's recipe names its files from the folder" in capfd.readouterr().err
    monkeypatch.chdir(run)
    assert main([".", "eval.max_prompts=1"]) == 0
    assert len(lines_of(run / "checkpoints" / "step_4.evaluation.jsonl")) == 1
    capfd.readouterr()


def test_an_adapter_is_refused_with_the_folder_of_the_whole_model(run: Path, capfd: Any):
    adapter = run / "checkpoints" / "step_4" / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    assert main([str(adapter)]) == 2
    assert f"name {adapter.with_name('hf')}" in capfd.readouterr().err


def test_a_reward_function_that_always_fails_ends_the_evaluation(run: Path, capfd: Any):
    with (run / "test.jsonl").open("a") as file:
        file.write('{"prompt": "a third"}\n')
    assert main([str(run), f"reward.path={run / 'rewards.py'}:broken"]) == 2
    assert "fails on every trajectory: ValueError: no such luck" in capfd.readouterr().err
    for file in (run / "checkpoints").glob("*.jsonl"):
        assert all("no such luck" in line["failure"] for line in lines_of(file))


def test_an_evaluation_without_any_score_fails_with_the_reasons(run: Path, capfd: Any):
    late = [f"reward.path={run / 'rewards.py'}:silent", "reward.timeout_s=0.1"]
    assert main([str(run), *late]) == 1
    out, error = capfd.readouterr()
    assert "2 x no answer within reward.timeout_s=0.1" in out
    assert "no response has a score" in error


def test_sigterm_ends_it_like_ctrl_c_and_leaves_no_empty_file(run: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any):
    def terminated(evaluation: LocalEvaluation) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        yield []

    monkeypatch.setattr(LocalEvaluation, "turns", terminated)
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the command has not taken the signal"))
    try:
        assert main([str(run)]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capfd.readouterr().err == "headrace: interrupted after 0 of 2 samples\n"
    assert not list(run.rglob("*.evaluation*"))


def test_help_names_the_forms_and_no_word_is_a_mistake(capfd: Any):
    assert main(["--help"]) == 0
    assert "MODEL [KEY=VALUE ...]" in capfd.readouterr().out
    assert main([]) == 2
    assert "name one model: a run folder, a checkpoint" in capfd.readouterr().err


def test_ctrl_c_ends_it_with_130_and_no_process_is_left(run: Path, tmp_path: Path):
    words = [str(run), f"reward.path={run / 'rewards.py'}:silent"]
    command = [sys.executable, "-m", "headrace.launch.evaluate", *words]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        deadline = time.monotonic() + PATIENCE_S
        while not (run / "started").exists():
            assert process.poll() is None and time.monotonic() < deadline, "no reward has been asked for"
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "interrupted after 0 of 2 samples" in error and "Traceback" not in error
