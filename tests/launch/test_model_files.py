"""The files of a policy: what all hosts must have alike has a digest."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from support.policies import tiny_policy

from headrace.launch.config.model_files import model_digests


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
