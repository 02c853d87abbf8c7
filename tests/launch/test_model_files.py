"""The facts about a policy that all hosts must have alike, and a policy that this host cannot compute."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.policies import tiny_policy

from headrace.comm.errors import SettingError
from headrace.comm.recipe import AlgorithmSettings, GeneratorSettings, ModelSettings, Recipe
from headrace.launch.config.checks.recipe import check_family, model_facts
from headrace.launch.config.model_files import model_digests
from headrace.trainer.policy import supported


def test_files_of_the_policy_that_all_hosts_need_alike_have_a_digest(tmp_path: Path):
    first = tiny_policy(tmp_path / "a")
    other = shutil.copytree(first, tmp_path / "b")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"_name_or_path": "b", "transformers_version": "0"}))
    known = model_digests(str(first), with_weights=True)
    assert model_digests(str(other), with_weights=True) == known
    assert model_digests(str(other), with_weights=False) == {"config_digest": known["config_digest"]}
    weights = load_file(other / "model.safetensors")
    save_file(weights | {name: 2 * weight for name, weight in [*weights.items()][:1]}, other / "model.safetensors")
    (other / "tokenizer_config.json").write_text("{}")
    found = model_digests(str(other), with_weights=True)
    assert all(found[part] != known[part] for part in known)


def test_exact_mode_on_a_gpu_without_triton_is_refused_before_a_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    policy, generator = tiny_policy(tmp_path), GeneratorSettings(exact=True)
    monkeypatch.setattr(supported, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_family(generator, AlgorithmSettings(), policy)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SettingError, match="generator.exact: on CUDA it needs Triton"):
        check_family(generator, AlgorithmSettings(), policy)


@pytest.mark.parametrize("role", ["actor", "rollout", "shard"])
@pytest.mark.parametrize("exact", [False, True])
def test_in_exact_mode_trainer_and_rollouts_announce_their_kernels(tmp_path: Path, role: str, exact: bool):
    model = ModelSettings(path=str(tiny_policy(tmp_path)))
    facts = model_facts(role, Recipe(model=model, generator=GeneratorSettings(exact=exact)))
    assert ("exact_kernels" in facts) == (exact and role != "shard")
    if "exact_kernels" in facts:
        assert torch.__version__ in facts["exact_kernels"]


def test_one_tokenizer_in_other_files_has_the_same_digest(tmp_path: Path):
    first = tiny_policy(tmp_path / "a")
    other = shutil.copytree(first, tmp_path / "b")
    assert (first / "tokenizer.json").exists()
    known = model_digests(str(first), with_weights=False)
    settings = json.loads((first / "tokenizer_config.json").read_text())
    written = settings | {"name_or_path": "b", "transformers_version": "0"}
    (other / "tokenizer_config.json").write_text(json.dumps(written, indent=4))
    (other / "vocab.json").write_text("{}")
    (other / "merges.txt").write_text("")
    assert model_digests(str(other), with_weights=False) == known
    (other / "tokenizer_config.json").write_text(json.dumps(written | {"chat_template": "another"}))
    assert model_digests(str(other), with_weights=False) != known
