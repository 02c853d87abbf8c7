"""`--try` shows prompts, rewards and tools as a run has them, and says what is wrong with them."""

import json
import re
from pathlib import Path

import pytest
from support.policies import tiny_policy

from headrace.launch.run import main

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
TOOLS = '''
def double(number: int, mode: str = "fast") -> int:
    """Double a number.

    Args:
        number: The number.
        mode: How.
    """
    return 2 * number


def broken(text: str) -> str:
    """Fail.

    Args:
        text: Anything.
    """
    return undefined + text


def picky(text: str) -> float:
    """Read a number.

    Args:
        text: The number.
    """
    return float(text)
'''


class Tried:
    """A recipe's folder, tried with the functions of one file."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capfd = capfd

    def __call__(
        self, source: str, *words: str, row: dict | None = None, paths: str = "reward"
    ) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        (self.folder / "rewards.py").write_text(source)
        (self.folder / "rows.jsonl").write_text(json.dumps(row or {"prompt": "2 + 2 =", "answer": 4}) + "\n")
        settings = {"data.path": self.folder / "rows.jsonl", "reward.path": f"{self.folder / 'rewards.py'}:{paths}"}
        given = {word.partition("=")[0] for word in words}
        made = [f"{name}={value}" for name, value in settings.items() if name not in given]
        code = main(
            ["--try", *made, *words] if not any(word.startswith("--try") for word in words) else [*made, *words]
        )
        told = self.capfd.readouterr()
        return code, told.out, told.err


@pytest.fixture
def tried(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Tried:
    folder = tmp_path / "my task"
    folder.mkdir()
    return Tried(folder, capfd)


def test_the_prompt_is_shown_as_the_model_gets_it_and_the_reward_of_the_rows_answer(tried: Tried):
    tiny_policy(tried.folder, "llama")
    tried.capfd.readouterr()
    source = "def reward(solution_str, answer, completion_ids):\n    return (float(solution_str == str(answer)), {'n': len(completion_ids)})\n"
    words = f"model.path={tried.folder / 'llama'}", f"data.chat_template={TEMPLATE}"
    code, output, errors = tried(source, *words)
    assert (code, errors) == (0, "")
    assert "<user>2 + 2 =<assistant>" in output and " tokens):" in output
    assert "response (the row's ground truth): '4'" in output
    assert "reward 1 (reward/n 1, reward 1; " in output and output.endswith("all is well\n")
    assert not (tried.folder.parent / "runs").exists() and not Path("runs/run").exists()


def test_the_response_is_the_one_that_is_given_or_a_placeholder_that_is_named(tried: Tried):
    source = "def reward(completions):\n    return [float(len(each)) for each in completions]\n"
    code, output, _ = tried(source, "--response", "four words in it")
    assert code == 0 and "response (--response): 'four words in it'" in output and "reward 16 " in output
    code, output, _ = tried(source, row={"prompt": "p"})
    assert code == 0 and "response (a placeholder; give another with --response TEXT): 'This is a response.'" in output


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    float(solution_str == answer)", "reward.path: the reward function returned None; is a `return` missing?"),
        ("    return float('nan')", "reward.path: the reward function returned nan"),
        ("    return helper(answer)", "reward.path: ValueError: no 4 (rewards.py:2)"),
        ("    while True: pass", "reward.path: no answer within reward.timeout_s=1"),
        ("    import os; os._exit(3)", "reward.path: the reward process ended with 3"),
        ("    return 'good'", "returned 'good', which is not a number"),
    ],
)
def test_what_is_wrong_with_a_reward_is_one_line_that_names_the_setting(tried: Tried, body: str, message: str):
    source = (
        f"def helper(answer):\n    raise ValueError(f'no {{answer}}')\n\ndef reward(solution_str, answer):\n{body}\n"
    )
    code, output, errors = tried(source, "reward.timeout_s=1")
    assert code == 2 and message in errors and errors.count("\n") == 1
    assert output.endswith("a mistake was found\n")
    if "helper" in body:
        assert "    rewards.py:5 in reward: return helper(answer)\n    rewards.py:2 in helper: raise" in output


@pytest.mark.parametrize("body", ["while True: pass", "import os, time; time.sleep(.2); os._exit(3)"])
def test_a_call_that_ends_its_process_has_taken_time(tried: Tried, body: str):
    code, output, _ = tried(f"def reward(solution_str):\n    {body}\n", "reward.timeout_s=0.3")
    found = re.search(r"reward none \(no function gave one; ([\d.]+) s ", output)
    assert code == 2 and found is not None and float(found[1]) >= 0.2, output


def test_the_weights_of_a_model_on_the_hub_are_not_downloaded(tried: Tried, monkeypatch: pytest.MonkeyPatch):
    folder = tiny_policy(tried.folder, "llama")
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, allow_patterns: asked.extend(allow_patterns) or str(folder)
    )
    code, _, _ = tried("def reward(solution_str):\n    return 1.0\n", "model.path=someone/large")
    assert code == 0 and "*.json" in asked and not [each for each in asked if "safetensors" in each]


@pytest.mark.parametrize("name", ["quickstart", "calculator", "smollm2"])
def test_a_recipe_that_comes_with_the_project_is_tried_without_its_policy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def makes(*_: object) -> None:
        raise AssertionError("a policy is made or fetched")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("headrace.launch.recipes.parts.make_policy", makes)
    monkeypatch.setattr("headrace.launch.recipes.smollm2.fetch", makes)
    assert main([name, "--try"]) == 0
    output = capfd.readouterr().out
    assert "  prompt (as in the data, since model.path is not set):" in output and output.endswith("all is well\n")


def test_a_batch_function_that_returns_one_reward_for_all_is_found(tried: Tried):
    code, _, errors = tried("def reward(completions):\n    return [1.0]\n")
    assert code == 2 and "reward returned 1 rewards for 2 completions" in errors


@pytest.mark.parametrize(
    ("body", "words", "note"),
    [
        ("0.0", [], "reward gave 0 for all 5 responses of this trial"),
        ("0.0", ["--response", "no answer"], "reward gave 0 for all 5 responses of this trial"),
        ("float(solution_str == str(answer))", ["--response", "no answer"], ""),
        ("float(solution_str == str(answer))", [], ""),
        ("float(int(solution_str) == answer)", [], "the response 'This is a response.' has no reward: ValueError: "),
    ],
)
def test_a_reward_that_is_the_same_for_all_responses_is_not_well(tried: Tried, body: str, words: list[str], note: str):
    code, output, errors = tried(f"def reward(solution_str, answer):\n    return {body}\n", *words)
    assert (code, errors) == (0, "")
    assert f"warning: reward.path: {note}" in output if note else "warning" not in output
    assert output.endswith("\nno mistake was found\n" if note else "\nall is well\n")


def test_functions_that_ask_for_a_form_or_leave_a_row_out_are_well(tried: Tried):
    source = """import re
def tags(solution_str):
    return float(re.fullmatch(r"<think>.+</think>\\s*<answer>4</answer>", solution_str) is not None)
def boxed(solution_str):
    return float("\\\\boxed{4}" in solution_str)
def others(solution_str):
    return None
"""
    file = tried.folder / "rewards.py"
    paths = ", ".join(f"{file}:{name}" for name in ("tags", "boxed", "others"))
    code, output, _ = tried(
        source, f"reward.path=[{paths}, format, marked]", row={"prompt": "p", "answer": "2+2 #### 4"}
    )
    assert code == 0 and output.endswith("\nall is well\n"), output


def test_a_file_that_cannot_be_loaded_is_told_with_its_line(tried: Tried):
    code, _, errors = tried("import no_such_module\n\ndef reward(solution_str):\n    return 1.0\n")
    assert code == 2 and "reward.path: " in errors and "cannot be loaded: ModuleNotFoundError" in errors
    assert "(rewards.py:1)" in errors


def test_each_tool_is_called_once_with_arguments_of_its_schema(tried: Tried):
    (tried.folder / "tools.py").write_text(TOOLS)
    tools = ", ".join(f"{tried.folder / 'tools.py'}:{name}" for name in ("double", "broken", "picky"))
    row = {"prompt": [{"role": "user", "content": "2 + 2 ="}], "answer": 4}
    code, output, errors = tried("def reward(solution_str):\n    return 1.0\n", f"environment.tools=[{tools}]", row=row)
    assert "double(number=1) -> '2' (" in output
    assert "picky(text='example') -> " in output and "the policy would read this error as the tool's answer" in output
    assert code == 2 and errors == (
        "headrace: error: environment.tools: broken(text='example'): NameError: name 'undefined' is not defined\n"
    )


def test_an_environment_without_tools_takes_a_step_with_the_response(tried: Tried):
    source = "class Room:\n    def reset(self, **row):\n        self.row = row\n\n    def step(self, text):\n        return 'go on', 0.5, text == '4'\n"
    path = f"environment.path={tried.folder / 'rewards.py'}:Room"
    code, output, _ = tried(source, path, "reward.path=")
    assert code == 0 and "step -> 'go on' (" in output and "reward 0.5, done)" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--try=0"], "--try=0: give a number of rows, from 1"),
        (["--try", "--response"], "argument --response: expected one argument"),
        (["--try", "--dry-run"], "--try: it starts no run"),
        (["--try", "data.path=no.jsonl"], "data.path: no.jsonl does not exist"),
        (["--try", "rollout.engine=emulated", "trainer.engine=emulated"], "--try: rollout.engine=emulated"),
    ],
)
def test_a_mistake_in_the_words_is_one_line(tried: Tried, words: list[str], message: str):
    code, _, errors = tried("def reward(solution_str):\n    return 1.0\n", *words)
    assert code == 2 and message in errors and errors.count("\n") == 1


def test_a_response_without_a_trial_is_refused(capfd: pytest.CaptureFixture[str]):
    assert main(["--response", "x", "run.steps=1"]) == 2
    assert "--response: only with --try" in capfd.readouterr().err
