"""Settings of `lora` that this program cannot follow are refused before a process starts; those without effect are warnings."""

import shutil
from pathlib import Path

import pytest
import torch
from support.policies import tiny_policy

from headrace.comm.errors import SettingError
from headrace.comm.recipe import LoraSettings
from headrace.launch.config.checks.adapter import check_lora
from headrace.launch.config.checks.recipe import check_settings
from headrace.launch.config.load import read_recipe
from headrace.relay.checkpoints import CheckpointFolder
from headrace.trainer.policy.adapter_files import AdapterBase, keep_start, write_adapter
from headrace.trainer.policy.lora import adapter_weights, add_adapter
from headrace.trainer.policy.model import load_policy


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.engine=own.py:main"], r"lora\.rank: only with trainer\.engine=builtin.*own\.py:main"),
        (["rollout.engine=own.py:Own"], r"lora\.rank: only with .*rollout\.engine"),
        (["lora.targets=[q_proj,experts]"], r"lora\.targets: no linear layer is named 'experts'; .* q_proj, k_proj"),
        (["lora.targets=lm_head"], r"lora\.targets: .*'lm_head'"),
    ],
)
def test_what_an_adapter_cannot_do_is_refused(tmp_path: Path, words: list[str], message: str):
    with pytest.raises(SettingError, match=message):
        check_lora(read_recipe(None, ["lora.rank=4", *words]), tiny_policy(tmp_path))


def test_emulated_devices_have_no_adapter():
    words = ["lora.rank=4", "trainer.engine=emulated", "rollout.engine=emulated"]
    with pytest.raises(SettingError, match=r"lora\.rank: emulated devices"):
        check_settings(read_recipe(None, words))


def test_experts_without_an_adapter_and_settings_without_a_rank_are_warnings(tmp_path: Path):
    (warning,) = check_lora(read_recipe(None, ["lora.rank=4"]), tiny_policy(tmp_path, "mixtral"))
    assert "experts" in warning
    (warning,) = check_lora(read_recipe(None, ["lora.alpha=4"]), tmp_path)
    assert "lora.rank=0" in warning
    assert check_lora(read_recipe(None), tmp_path) == []
    assert check_lora(read_recipe(None, ["lora.rank=4"]), tiny_policy(tmp_path)) == []


@pytest.mark.parametrize("change", ["another", "none", "without", "gone", "the same"])
def test_a_changed_adapter_of_a_run_that_is_resumed_is_a_warning(tmp_path: Path, change: str):
    base, run = tiny_policy(tmp_path), tmp_path / "run"
    policy = load_policy(base, shard=lambda p: add_adapter(p.model, LoraSettings(rank=4), 7, torch.float32))
    for name, factor in (("first", 1), ("another", 2)):
        weights = {key: factor * weight for key, weight in adapter_weights(policy.model).items()}
        write_adapter(tmp_path / name, weights, LoraSettings(rank=4), AdapterBase.read(str(base)))
    words = ["lora.rank=4", f"run.dir={run}", f"model.path={base}"]
    run.mkdir()
    if change != "without":
        recipe = read_recipe(None, [*words, f"lora.path={tmp_path / 'first'}"])
        keep_start(recipe.run.dir, recipe.lora)
    (run / "journal.jsonl").touch()
    given = {"none": "", "another": tmp_path / "another"}.get(change, tmp_path / "first")
    if change == "gone":
        shutil.rmtree(tmp_path / "first")
    resumed = read_recipe(None, [*words, f"lora.path={given}"])
    assert check_lora(resumed, base) == [], "a run without a checkpoint begins again"
    CheckpointFolder(run).begin(2)
    CheckpointFolder(run).seal(2)
    warned = {
        "another": ["lora.path has no effect: the run began with another adapter, and continues from its checkpoint"],
        "without": ["lora.path has no effect: the run began without an adapter, and continues from its checkpoint"],
        "none": [
            f"lora.path is not set: the run continues with the adapter that it began with, {run / 'start_adapter'}"
        ],
    }
    assert check_lora(resumed, base) == warned.get(change, [])
