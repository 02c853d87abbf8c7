"""A reader who follows the page for beginners, with a small policy under the model's name and a run of two steps, gets what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.policies import policy_with_template
from support.source_tree import ROOT

import headrace

PAGE = (ROOT / "docs" / "use" / "getting-started.md").read_text()
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
FILE = re.compile(r"`(\w+\.(?:jsonl|py|yaml))`[^`]*:\n\n```\w+\n(.*?)```", re.DOTALL)
READING = re.compile(r"```python\n(import headrace\n.*?)```", re.DOTALL)
USE = re.compile(r"```python\n(import transformers\n.*?)```", re.DOTALL)
COMMANDS = re.compile(r"```bash\n(.*?)```", re.DOTALL)
HEADRACE = "import sys; from headrace.launch.command import main; sys.exit(main())"
SMALL = ["batch.prompts_per_step=2", "batch.samples_per_prompt=2", "eval.max_prompts=4", "optimizer.warmup_steps=0"]
DEADLINE_S = 800


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's files, whose names end the sentences before them."""
    folder = tmp_path_factory.mktemp("a user")
    policy_with_template(folder / MODEL)
    for name, text in FILE.findall(PAGE):
        (folder / name).write_text(text)
    return folder


def follow(home: Path, line: str, *, steps: int) -> str:
    """The output of a command of the page, in a run of `steps` small steps."""
    program, *words = re.sub(r"run\.steps=\d+", "", line).split()
    command = [sys.executable, *words]
    if program == "headrace":
        small = SMALL[2:3] if words[0] == "eval" else [*SMALL, f"run.steps={steps}"]
        command = [sys.executable, "-c", HEADRACE, *words, *small]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_leads_from_three_files_to_a_model_that_is_evaluated_and_trained_further(home: Path):
    shown = [path.name for path in home.iterdir() if path.is_file()]
    assert sorted(shown) == ["make_sums.py", "rewards.py", "sums.jsonl", "sums.yaml"]
    checks, training, evaluation, resumed = (block.strip().splitlines() for block in COMMANDS.findall(PAGE))
    tried, planned = (follow(home, line, steps=2) for line in checks)
    assert "reward 1 (right 1;" in tried and tried.endswith("all is well\n")
    assert "What is 27 + 82? Answer with the number only." in tried
    assert "of 3 prompts" in planned and not (home / "runs").exists()

    made, trained = (follow(home, line, steps=2) for line in training)
    assert not made and "step 2/2" in trained and "held_out: avg@1" in trained
    run = headrace.Run(home / "runs" / "sums")
    assert run.model == run.dir / "checkpoints" / "step_2" / "hf" and "checkpoints/step_60/hf" in PAGE
    assert (run.dir / "checkpoints" / "latest").exists() and run.evaluations()
    (reading,) = READING.findall(PAGE)
    read = subprocess.run([sys.executable, "-c", reading], cwd=home, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in read.stdout.splitlines()[:4]] == ["0.0"] * 4
    (line,) = evaluation
    assert "eval/held_out/avg@1" in follow(home, line, steps=2)

    (use,) = USE.findall(PAGE)
    use = use.replace("step_60", "step_2")
    answered = subprocess.run([sys.executable, "-c", use], cwd=home, capture_output=True, text=True, check=False)
    assert answered.returncode == 0, answered.stderr

    (line,) = resumed
    assert "step 3/3" in follow(home, line, steps=3) and len(run.metrics) == 3
