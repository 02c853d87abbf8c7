"""The weights of a checkpoint: those that transformers loads, or a refusal that names what is wrong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.policies import FAMILIES, tiny_policy
from transformers import AutoModelForCausalLM

from headrace.comm.errors import SettingError
from headrace.trainer.export import save_policy
from headrace.trainer.policy.model import load_policy


@pytest.mark.parametrize("family", [*FAMILIES])
def test_a_policy_has_the_weights_and_buffers_that_transformers_loads(tmp_path, family):
    path = tiny_policy(tmp_path, family)
    for dtype in (torch.float32, torch.bfloat16):
        policy, reference = load_policy(path, dtype), AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        found, wanted = (
            dict([*model.state_dict().items(), *model.named_buffers()]) for model in (policy.model, reference)
        )
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", ["phi3", "mixtral", "qwen3_moe"])
def test_an_exported_policy_is_loaded_again_as_it_was(tmp_path, family):
    policy = load_policy(tiny_policy(tmp_path, family))
    save_policy(policy, tmp_path / "export")
    again = load_policy(tmp_path / "export").weights()
    assert all(torch.equal(again[name], weight) for name, weight in policy.weights().items())


def test_a_checkpoint_of_several_files_is_read_as_its_index_says(tmp_path):
    path = tiny_policy(tmp_path)
    expected = load_policy(path).weights()
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for file in {*names.values()}:
        save_file({name: tensors[name] for name in names if names[name] == file}, path / file)
    save_file({"other": torch.zeros(3)}, path / "consolidated.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert all(torch.equal(load_policy(path).weights()[name], weight) for name, weight in expected.items())
    (path / "part-1.safetensors").unlink()
    with pytest.raises(SettingError, match=r"model\.path: .* has no part-1\.safetensors"):
        load_policy(path)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/other.safetensors", "sub/other.safetensors", "..", 3])
def test_an_index_that_leaves_its_folder_is_refused(tmp_path, name):
    path = tiny_policy(tmp_path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(
        SettingError, match=r"model\.path: .* names a file that is not a safetensors file of its folder"
    ):
        load_policy(path)


def spoil(path, change):
    """Apply a change to the tensors of a checkpoint."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


FAULTS = {
    r"lacks weights of the model: lm_head\.weight$": lambda tensors: tensors.pop("lm_head.weight"),
    r"lacks weights of the model: (model\.layers\S+, ){3}\S+ and 14 more": lambda tensors: [
        tensors.pop(name) for name in [*tensors] if ".layers." in name
    ],
    r"weights without a place in the model: model\.extra": lambda tensors: tensors.update(
        {"model.extra": torch.ones(2)}
    ),
    r"model\.norm\.weight has the shape \[7\] .* and \[64\]": lambda tensors: tensors.update(
        {"model.norm.weight": torch.ones(7)}
    ),
    r"model\.norm\.weight .* not finite": lambda tensors: tensors["model.norm.weight"][3:4].fill_(float("nan")),
    r"down_proj\.weight .* not finite": lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"][5, 6:7].fill_(
        float("inf")
    ),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_checkpoint_with_wrong_weights_is_refused_by_their_names(tmp_path, message):
    path = tiny_policy(tmp_path, tie_word_embeddings=False)
    spoil(path, FAULTS[message])
    with pytest.raises(SettingError, match=f"model.path: .*{message}"):
        load_policy(path)


def test_experts_that_are_not_all_there_are_refused(tmp_path):
    path = tiny_policy(tmp_path, "qwen3_moe")
    spoil(path, lambda tensors: tensors.pop("model.layers.1.mlp.experts.2.up_proj.weight"))
    with pytest.raises(SettingError, match=r"model\.path: model\.layers\.1\.mlp\.experts"):
        load_policy(path)


def test_a_damaged_file_is_refused(tmp_path):
    path = tiny_policy(tmp_path)
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SettingError, match=r"model\.path: .*model\.safetensors is not a complete safetensors file"):
        load_policy(path)


def test_pickled_weights_are_refused_with_advice(tmp_path):
    path = tiny_policy(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(
        SettingError, match=r"model\.path: .* no \*\.safetensors weights; its \*\.bin files are pickles"
    ):
        load_policy(path)
