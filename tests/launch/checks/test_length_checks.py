"""Prompts are measured as rollouts will render them."""

from pathlib import Path

import pytest
from support.policies import character_tokenizer

from headrace.comm.errors import SettingError
from headrace.comm.recipe import DataSettings, EnvironmentSettings
from headrace.launch.config.checks.data import check_lengths
from headrace.launch.config.model_files import ModelFiles

TOOL = 'def add(a: int, b: int) -> int:\n    """Adds.\n\n    Args:\n        a: one\n        b: two\n    """\n'


def test_the_length_of_a_prompt_counts_the_tools_that_its_template_shows(tmp_path: Path):
    (tmp_path / "tools.py").write_text(TOOL)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "policy")
    policy = ModelFiles(tmp_path / "policy", context=100)
    prompts = [[{"role": "user", "content": "add them"}]]
    data = DataSettings(path="data.jsonl")
    assert check_lengths(data, prompts, policy, EnvironmentSettings(), wanted=8) == []
    with pytest.raises(SettingError, match=r"data\.too_long: prompt 1 of .* leaves no room"):
        check_lengths(data, prompts, policy, EnvironmentSettings(tools=(f"{tmp_path}/tools.py:add",)), wanted=8)
