"""Settings of `lora` that this program cannot follow are refused before a process starts; those without effect are warnings."""

from pathlib import Path

import pytest
from support.policies import tiny_policy

from headrace.comm.errors import SettingError
from headrace.launch.config.adapter_checks import check_lora
from headrace.launch.config.checks import check_combinations
from headrace.launch.config.load import read_recipe


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
        check_combinations(read_recipe(None, words))


def test_experts_without_an_adapter_and_settings_without_a_rank_are_warnings(tmp_path: Path):
    (warning,) = check_lora(read_recipe(None, ["lora.rank=4"]), tiny_policy(tmp_path, "mixtral"))
    assert "experts" in warning
    (warning,) = check_lora(read_recipe(None, ["lora.alpha=4"]), tmp_path)
    assert "lora.rank=0" in warning
    assert check_lora(read_recipe(None), tmp_path) == []
    assert check_lora(read_recipe(None, ["lora.rank=4"]), tiny_policy(tmp_path)) == []
