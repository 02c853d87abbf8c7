"""`headrace.train` and `headrace.Run`, as a script and a notebook use them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.job import descendants_of
from support.notebook import Notebook
from support.policies import policy_with_template
from support.source_tree import ROOT
from transformers import AutoModelForCausalLM

import headrace
from headrace.launch.config.load import read_recipe, save_recipe
from headrace.launch.config.run_checkpoints import TrainedModel
from headrace.launch.python.watched_run import RunEnd, WatchedRun

DEADLINE_S = 800
POLICY = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMALL: dict[str, Any] = {
    "num_generations": 2,
    "batch": {"prompts_per_step": 2},
    "max_completion_length": 4,
    "checkpoint.every": 0,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small policy under the name of README's."""
    folder = tmp_path_factory.mktemp("a user")
    policy_with_template(folder / POLICY)
    return folder


@pytest.fixture(scope="module")
def readme_run(home: Path) -> headrace.Run:
    """The run of README's script, which has two steps here."""
    text = re.search(r"```python\n(import headrace.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert text is not None and text[1].count("steps=60") == 1
    (home / "script.py").write_text(text[1].replace("steps=60", "steps=2"))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=home, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"{home}/runs/run/checkpoints/step_2/hf {{'eval/version': 2.0")
    return headrace.Run(home / "runs" / "run")


def test_readmes_script_gives_a_run_with_its_metrics_samples_and_answers(readme_run: headrace.Run):
    assert [metrics["step"] for metrics in readme_run.metrics] == [0, 1]
    assert readme_run.summary["status"] == "finished"
    assert repr(readme_run) == f"Run({str(readme_run.dir)!r}): finished, 2 steps"
    samples = readme_run.samples()
    mean = sum(sample["reward"] for sample in samples) / len(samples)
    assert len(samples) == 128 and mean == pytest.approx(readme_run.metrics[1]["reward/mean"])
    assert {sample["step"] for sample in samples} == {1}
    assert all(
        re.fullmatch(r"What is \d+ \+ \d+\? Answer with the number only\.\n", each["prompt"]) for each in samples
    )
    assert all(each["rewards"] == {"right": each["reward"]} for each in samples)
    assert readme_run.samples(0)[0]["step"] == 0
    with pytest.raises(headrace.SettingError, match=r"step 7: .*/rows has the rows of steps 0 to 1"):
        readme_run.samples(7)
    answers = readme_run.evaluations()
    assert len(answers) == 200 and {answer["version"] for answer in answers} == {0, 2}


def test_a_run_has_its_model_which_can_be_copied_and_trained_again(readme_run: headrace.Run, tmp_path: Path):
    assert readme_run.model == readme_run.dir / "checkpoints" / "step_2" / "hf"
    copied = readme_run.export(tmp_path / "my model")
    AutoModelForCausalLM.from_pretrained(copied)
    with pytest.raises(headrace.SettingError, match="my model exists; give a new folder"):
        readme_run.export(copied)
    for folder in (readme_run.dir, readme_run.dir / "checkpoints" / "step_2", readme_run.model):
        assert TrainedModel.find(str(folder)).path == str(readme_run.model)


def test_the_recipe_of_a_run_from_python_is_one_of_the_command_line(readme_run: headrace.Run, tmp_path: Path):
    recipe = read_recipe(readme_run.dir / "inputs" / "recipe.yaml")
    assert (recipe.run.steps, recipe.optimizer.lr, recipe.data.chat_template) == (2, 3e-5, "tokenizer")
    assert recipe.reward.path == f"{readme_run.dir}/inputs/functions.py:right"
    assert readme_run.recipe.sampling == recipe.sampling
    command = [
        "-m",
        "headrace.launch.run",
        str(readme_run.dir / "inputs/recipe.yaml"),
        f"run.dir={tmp_path}",
        "--dry-run",
    ]
    subprocess.run([sys.executable, *command], cwd="/", timeout=DEADLINE_S, check=True, stdout=subprocess.DEVNULL)


def test_a_run_that_has_ended_is_not_resumed_without_more_steps(readme_run: headrace.Run):
    before = sorted(readme_run.dir.rglob("*"))
    with pytest.raises(headrace.SettingError, match=r"has finished after step 2; resume\(steps=N\) with more than 2"):
        readme_run.resume()
    with pytest.raises(headrace.SettingError, match="unknown setting 'stepz'"):
        readme_run.resume(stepz=3)
    assert sorted(readme_run.dir.rglob("*")) == before


def test_a_folder_with_a_run_keeps_its_files_when_another_run_is_refused_there(readme_run: headrace.Run):
    before = (readme_run.dir / "inputs" / "prompts.jsonl").read_text()
    with pytest.raises(headrace.SettingError, match=r"run.dir: .* holds a run already"):
        headrace.train(readme_run, "length", ["other"], run_dir=readme_run.dir)
    assert (readme_run.dir / "inputs" / "prompts.jsonl").read_text() == before


def test_a_notebook_stops_and_resumes_its_run(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """An error of its callback ends the run in order and is raised as it is; no process is left then. True ends it too."""
    monkeypatch.chdir(tmp_path)
    notebook = Notebook().cell("import headrace\nLONGEST = 40\nfull = OSError(28, 'mine is full')\nsteps = []")
    notebook.cell("def long(completion_ids, **rest):\n    return [len(ids) / LONGEST for ids in completion_ids]")
    notebook.cell("def fail(metrics):\n    if metrics['step'] == 1:\n        raise full")
    notebook.names |= {"small": SMALL, "policy": home / POLICY}
    notebook.cell("def train():\n    return headrace.train(policy, long, ['a', 'b'], steps=500, on_step=fail, **small)")
    children = set(descendants_of(os.getpid()))
    with pytest.raises(OSError, match="mine is full") as raised:
        notebook.cell("train()")
    assert raised.value is notebook.names["full"]
    assert set(descendants_of(os.getpid())) <= children
    run = headrace.Run(tmp_path / "runs" / "run")
    assert run.summary["status"] == "interrupted" and run.model.is_dir()
    trained = run.summary["steps"]
    assert 2 <= trained < 500
    seen = list[int]()

    def stop(metrics: dict[str, Any]) -> bool:
        seen.append(metrics["step"])
        return len(seen) == 2

    resumed = run.resume(on_step=stop)
    assert resumed.summary["status"] == "interrupted" and trained + 2 <= resumed.summary["steps"] < 500
    assert seen == [trained, trained + 1]
    assert f"the run continues after step {trained}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"reward": lambda text: 1}, "reward.path: a lambda has no name"),
        ({"model": object()}, "model.path: a model is the path of its folder or its name on the Hub, not an object of type object"),
        ({"data": {"prompt": ["a"]}}, "data.path: rows are a path, a list of dicts or of texts, .* not an object of type dict"),
        ({"data": iter(["a"])}, "data.path: rows are .* not an object of type list_iterator"),
        ({"data": [{"prompt": "a"}, 3]}, "data.path: row 2 is a int, neither a dict of columns nor a text"),
        ({"eval": [{"prompt": "a", "image": object()}]}, "eval.path: the column image has values that JSON cannot hold"),
        ({"steps": 0}, "run.steps=0 is not allowed"),
        ({"tools": print}, "environment.tools: .* builtin_function_or_method is not a function"),
        ({"on_step": 5}, "on_step: an object of type int is not a function"),
        ({"learning_rate": object()}, "optimizer.lr: an object of type object cannot be the value of a setting"),
        ({"reward_weights": [0.9, object()]}, "reward.weights: an object of type object cannot be the value of a setting"),
        ({"stepz": 3}, "unknown setting 'stepz'"),
        ({"environment": Notebook}, "'environment' is a section; set one of its settings, such as environment.path"),
        ({"data": {"path": ["a"], "prompt_column": "prompt"}, "data.path": "b"}, "data.path is given twice"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_before_anything_is_written(
    arguments: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    given = {"model": "m", "reward": "length", "data": ["a"]} | arguments
    with pytest.raises(headrace.SettingError, match=told):
        headrace.train(**given)
    assert not [*tmp_path.iterdir()]


def test_a_mistake_that_the_launcher_finds_is_raised_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(headrace.SettingError, match=r"^model.path: nowhere does not exist$"):
        headrace.train("nowhere", "length", ["a"])
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A launcher that saves the recipe as `headrace run` does, and what is called while it runs: `launched.append(call)`."""
    calls = list[Any]()

    def run(self: WatchedRun, words: list[str]) -> RunEnd:
        if calls:
            calls.pop()()
        recipe = read_recipe(words[0])
        if not Path(str(recipe.data.path)).exists():
            return RunEnd(2, "data.path: no such file")
        save_recipe(recipe)
        return RunEnd(0, "")

    monkeypatch.setattr(WatchedRun, "run", run)
    return calls


def two_functions() -> tuple[Any, Any]:
    notebook = Notebook().cell("def score(completion_ids):\n    return [1.0]")
    first = notebook.names["score"]
    notebook.cell("def score(completion_ids):\n    return [-1.0]")
    return first, notebook.names["score"]


def used_by(run: headrace.Run) -> tuple[str, str]:
    """The last lines of a run's function and rows."""
    files = str(run.recipe.reward.path).partition(":")[0], str(run.recipe.data.path)
    function, rows = (Path(file).read_text().splitlines()[-1] for file in files)
    return function.strip(), rows


def test_scripts_that_start_at_the_same_time_have_a_run_folder_each(
    launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    one, other = two_functions()
    made = list[headrace.Run]()
    launched.append(lambda: made.append(headrace.train("m", other, ["b"])))
    made.append(headrace.train("m", one, ["a"]))
    assert [(run.dir.name, *used_by(run)) for run in made] == [
        ("run-2", "return [-1.0]", '{"prompt": "b"}'),
        ("run", "return [1.0]", '{"prompt": "a"}'),
    ]


def test_a_second_call_in_a_run_folder_changes_no_file_of_the_first(launched: list[Any], tmp_path: Path):
    """It comes before the first run has a journal."""
    one, other = two_functions()
    launched.append(lambda: headrace.train("m", other, ["b"], run_dir=tmp_path / "run"))
    run = headrace.train("m", one, ["a"], run_dir=tmp_path / "run")
    assert used_by(run) == ("return [1.0]", '{"prompt": "a"}')


def test_a_refused_start_leaves_the_functions_and_rows_of_the_run(launched: list[Any], tmp_path: Path):
    one, other = two_functions()
    run = headrace.train("m", one, ["a"], eval=["c"], run_dir=tmp_path / "run")
    before = {path: path.read_bytes() for path in run.dir.rglob("*") if path.is_file()}
    with pytest.raises(headrace.SettingError, match="no such file"):
        run.resume(steps=4, reward_funcs=other, eval_dataset=["d"], data_path="missing.jsonl")
    assert {path: path.read_bytes() for path in run.dir.rglob("*") if path.is_file()} == before
    resumed = run.resume(steps=4, reward_funcs=other, eval_dataset=["d"])
    assert used_by(resumed) == ("return [-1.0]", '{"prompt": "a"}')
    assert resumed.recipe.eval.path == f"{run.dir}/inputs_2/held_out.jsonl"


def test_a_renamed_run_continues_with_its_own_functions_and_rows(
    launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another run has its old name now."""
    monkeypatch.chdir(tmp_path)
    one, other = two_functions()
    headrace.train("m", [one, "length"], ["a"]).dir.rename(tmp_path / "good")
    assert headrace.train("m", other, ["b"]).dir == tmp_path / "runs/run"
    resumed = headrace.Run("good").resume(steps=4)
    inputs = tmp_path / "good" / "inputs"
    assert resumed.recipe.reward.path == (f"{inputs}/functions.py:score", "length")
    assert (resumed.recipe.data.path, resumed.recipe.run.dir) == (f"{inputs}/prompts.jsonl", f"{tmp_path}/good")


def test_the_model_of_a_renamed_run_is_its_own(launched: list[Any], tmp_path: Path):
    runs = [headrace.train("m", "length", ["a"], run_dir=tmp_path / name) for name in ("first", "second")]
    for run in runs:
        exported = run.dir / "checkpoints" / "step_2" / "hf"
        exported.mkdir(parents=True)
        (exported / "config.json").write_text("{}")
        (run.dir / "summary.json").write_text(json.dumps({"export": str(exported)}))
    renamed = runs[0].dir.rename(tmp_path / "good")
    runs[1].dir.rename(tmp_path / "first")
    assert headrace.Run(renamed).model == renamed / "checkpoints" / "step_2" / "hf"


def test_an_interrupt_after_the_run_has_begun_leaves_what_it_needs_to_continue(
    launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(self: WatchedRun, words: list[str]) -> RunEnd:
        save_recipe(read_recipe(words[0]))
        raise KeyboardInterrupt

    one, _ = two_functions()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(WatchedRun, "run", interrupted)
        headrace.train("m", one, ["a"], run_dir=tmp_path / "run")
    resumed = headrace.Run(tmp_path / "run").resume(steps=2)
    assert used_by(resumed) == ("return [1.0]", '{"prompt": "a"}')


def test_torchrun_does_not_start_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(headrace.SettingError, match="starts torchrun itself; start the script with python"):
        headrace.train("m", "length", ["a"], run_dir=tmp_path / "run")


def test_a_folder_without_a_run_is_not_opened(tmp_path: Path):
    with pytest.raises(headrace.SettingError, match="holds no run"):
        headrace.Run(tmp_path)
