"""The recipes that come with the project: each fits the GPUs that it names, reads its data set as published, and says what has not run."""

import json
import re
from pathlib import Path

import pytest
import yaml
from support.assets import GSM8K
from support.job import MakeJob
from support.policies import tiny_policy
from support.source_tree import ROOT

from headrace.comm.errors import SettingError
from headrace.comm.recipe import DataSettings, RewardSettings
from headrace.launch.config.checks.data import check_data
from headrace.launch.config.checks.recipe import check_function
from headrace.launch.config.checks.signatures import check_reward_arguments, check_tools
from headrace.launch.config.load import read_recipe
from headrace.launch.recipes import python_tool
from headrace.launch.run import main
from headrace.rollout.environments.schemas import tool_schemas
from headrace.rollout.rewards.function import has_ground_truth
from headrace.rollout.rewards.sandbox import SandboxError, SandboxResult

FOLDER = ROOT / "launch" / "recipes"
NO_GPU = "No GPU has run this recipe yet."
QWEN = {"model_type": "qwen2", "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 32768}
WIDTHS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
LARGE = QWEN | {"vocab_size": 152064, "tie_word_embeddings": False, "max_position_embeddings": 131072}
CONFIGS = {
    "Qwen/Qwen2.5-0.5B-Instruct": (QWEN, (896, 4864, 24, 14, 2)),
    "Qwen/Qwen2.5-1.5B-Instruct": (QWEN, (1536, 8960, 28, 12, 2)),
    "Qwen/Qwen2.5-3B-Instruct": (QWEN, (2048, 11008, 36, 16, 2)),
    "Qwen/Qwen2.5-7B": (LARGE, (3584, 18944, 28, 28, 4)),
    "Qwen/Qwen2.5-32B": (LARGE, (5120, 27648, 64, 40, 8)),
}
"""The sizes in the `config.json` of each model of a recipe."""
ON_GPUS = ["dapo-math-32b", "dapo-math-7b", "gsm8k", "gsm8k-lora-1.5b", "tools"]
SYSTEM = {"role": "system", "content": read_recipe(FOLDER / "gsm8k.yaml").data.system_prompt}


def of(name: str) -> Path:
    return FOLDER / f"{name}.yaml"


def test_a_recipe_for_gpus_says_in_its_first_line_that_none_has_run_it():
    first_lines = {file.stem: file.read_text().splitlines()[0] for file in FOLDER.glob("*.yaml")}
    assert sorted(name for name, line in first_lines.items() if line.endswith(NO_GPU)) == ON_GPUS
    assert all(line.startswith("# ") for line in first_lines.values())


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_recipe_fits_the_gpus_that_it_names_with_room(name, tmp_path, capsys):
    given = re.search(rf"headrace run {name} --dry-run (--gpus=\S+.*)", of(name).read_text())
    assert given
    common, widths = CONFIGS[read_recipe(of(name)).model.path]
    (tmp_path / "config.json").write_text(json.dumps(common | dict(zip(WIDTHS, widths, strict=True))))
    assert main([str(of(name)), f"model.path={tmp_path}", "--dry-run", *given[1].split()]) == 0
    captured = capsys.readouterr()
    assert "warning" not in captured.out + captured.err
    sums = re.findall(r"GPUs?: .*= ([\d.]+) of ([\d.]+) GB", captured.out)
    assert sums and all(float(used) < 0.9 * float(total) for used, total in sums)
    assert re.search(r"rollouts x \d{2,} = ", captured.out), "a rollout decodes tens of trajectories together"


def test_gsm8k_is_read_as_published():
    recipe = read_recipe(of("gsm8k"), [f"data.path={GSM8K}"])
    found = check_data(recipe.data)
    assert found.prompts[0][0] == SYSTEM and found.prompts[0][1]["role"] == "user"
    assert "question" in found.first_rows[0] and not check_reward_arguments(recipe.reward, found.first_rows, "data")


def test_dapo_s_columns_are_read_as_published(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    question = "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer"
    row = {
        "data_source": "math_dapo",
        "prompt": [{"content": question, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    }
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "dapo.parquet")
    for name in ("dapo-math-7b", "dapo-math-32b"):
        recipe = read_recipe(of(name), [f"data.path={tmp_path / 'dapo.parquet'}"])
        found = check_data(recipe.data)
        assert found.prompts == [[{"content": question, "role": "user"}]] and has_ground_truth(found.first_rows[0])
        assert check_reward_arguments(recipe.reward, found.first_rows, "data.path") == []


def test_the_five_lines_of_the_page_about_data_train_on_gsm8k_as_published(job: MakeJob, tmp_path):
    page = (ROOT / "docs" / "use" / "data.md").read_text()
    block = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert block and len(block[1].splitlines()) <= 5
    lines = yaml.safe_load(block[1])
    assert DataSettings(**{**lines["data"], "path": ""}).subset == "main" and lines["data"]["path"] == "openai/gsm8k"
    tiny_policy(tmp_path / "chat", "llama", max_position_embeddings=2048)
    config = tmp_path / "chat" / "llama" / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    run = job(
        model__path=tmp_path / "chat" / "llama", data__path=GSM8K, reward__path=lines["reward"]["path"],
        run__steps=2, batch__prompts_per_step=2, batch__samples_per_prompt=2, roles__rollout=1,
    )  # fmt: skip
    run.recipe = lines
    run.run()
    assert [row["step"] for row in run.metrics()] == [0, 1]
    assert "reward/gsm8k" in run.metrics()[0] and run.summary()["status"] == "finished"


def test_the_python_tool_is_a_tool_that_the_recipe_s_policy_can_call():
    settings = read_recipe(of("tools")).environment
    check_tools(settings)
    check_function("environment.tools", settings.tools[0])
    (schema,) = tool_schemas(settings) or [{}]
    assert schema["function"]["name"] == "python" and list(schema["function"]["parameters"]["properties"]) == ["code"]


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        (SandboxResult(0, "1776\n", ""), "1776"),
        (SandboxResult(0, "", ""), "The program printed nothing and ended with exit code 0."),
        (SandboxResult(1, "so far\n", "Traceback\n  ...\nZeroDivisionError: division by zero\n"), "so far\nZeroDivisionError: division by zero"),
        (SandboxResult(None, "so far\n", ""), "The program was ended after 10 seconds."),
        (SandboxResult(0, "x" * 9999, ""), "x" * 2000),
    ],
)  # fmt: skip
def test_the_python_tool_returns_what_a_program_prints_and_its_error(result, answer, monkeypatch):
    monkeypatch.setattr(python_tool, "run_python", lambda code, timeout_s: result)
    assert python_tool.python("code") == answer


def test_the_python_tool_runs_a_program():
    try:
        assert python_tool.python("print(37 * 48)") == "1776"
    except SandboxError as error:
        pytest.skip(f"this host has no sandbox: {error}")


@pytest.mark.parametrize("path", ["headrace.launch.recipes.none:python", "headrace.launch.recipes.python_tool:none"])
def test_a_tool_of_a_module_that_does_not_exist_is_a_mistake_that_names_the_setting(path):
    with pytest.raises(SettingError, match=r"environment\.tools: .*none"):
        check_function("environment.tools", path)


def test_a_reward_of_a_module_is_checked_against_the_columns():
    settings = RewardSettings(path="headrace.launch.recipes.addition:score")
    with pytest.raises(SettingError, match="score needs 'answer'"):
        check_reward_arguments(settings, [{"prompt": "x", "result": 1}], "data.path")
