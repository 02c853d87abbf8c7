"""For a setting of another trainer or of an earlier version, the message says what to use here."""

import re

import pytest

from headrace.comm.errors import SettingError
from headrace.launch.config.load import known_settings, read_recipe
from headrace.launch.config.peer_names import EARLIER, PEERS

NAMES = [(peer, name, target) for peer, names in PEERS.items() for name, target in names.items()]


@pytest.mark.parametrize(("peer", "name", "target"), NAMES)
def test_the_name_of_another_trainer_is_answered_with_the_one_here(peer: str, name: str, target: str):
    assert target in known_settings() and name not in known_settings()
    with pytest.raises(SettingError) as told:
        read_recipe(None, [f"{name}=1"])
    assert f"; {peer}'s {name} is {target}" in str(told.value)


@pytest.mark.parametrize("name", EARLIER)
def test_a_setting_of_an_earlier_version_is_answered_with_what_takes_its_place(name: str):
    word = name if "." in name else f"{name}.train_us"
    sections = {known.partition(".")[0] for known in known_settings()}
    named = re.findall(rf"\b(?:{'|'.join(sections)})\.\w+", EARLIER[name])
    assert name not in known_settings() and {*named} <= {*known_settings(), "launch.lab"}
    with pytest.raises(SettingError) as told:
        read_recipe(None, [f"{word}=1"])
    assert str(told.value) == f"unknown setting {word!r}; {EARLIER[name]}"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("actor_rollout_ref.rollout.n=8", "unknown setting 'actor_rollout_ref.rollout.n'; verl's rollout.n is batch.samples_per_prompt"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "; verl's optim.lr is optimizer.lr"),
        ("data.train_files=x", "; verl's train_files is data.path"),
        ("trainer.total_epochs=3", "; verl's total_epochs is run.steps"),
        ("num_generations=8", "unknown setting 'num_generations'; TRL's num_generations is batch.samples_per_prompt"),
        ("orchestrator.rollouts_per_example=8", "; prime-rl's rollouts_per_example is batch.samples_per_prompt"),
        ("model_init_kwargs.torch_dtype=bfloat16", "; TRL's torch_dtype is model.dtype"),
        ("generation_kwargs.min_tokens=8", "unknown setting 'generation_kwargs.min_tokens'; the settings of sampling are sampling.*"),
        ("quantization_config.load_in=8", "; quantized base models are left out"),
        ("deepspeed.stage=3", "; the ranks of roles.actor shard the policy with FSDP2"),
    ],
)  # fmt: skip
def test_names_are_recognised_at_any_depth(word: str, hint: str):
    with pytest.raises(SettingError) as told:
        read_recipe(None, [word])
    assert hint in str(told.value)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("optimizers.lr=1e-5", "the nearest is 'optimizer.lr'"),
        ("optimizers.name=adamw", "the nearest is 'optimizer.name'"),
        ("logger.level=debug", "--help lists all settings"),
        ("run_name.x=1", "--help lists all settings"),
    ],
)
def test_a_mistyped_section_that_is_a_peer_s_setting_is_answered_with_the_nearest(word: str, hint: str):
    with pytest.raises(SettingError) as told:
        read_recipe(None, [word])
    assert str(told.value) == f"unknown setting {word.partition('=')[0]!r}; {hint}"


def test_names_of_a_file_are_recognised_too(tmp_path):
    (tmp_path / "verl.yaml").write_text("actor_rollout_ref:\n  rollout:\n    n: 8\n    temperature: 1\n")
    with pytest.raises(SettingError, match="rollout.n'; verl's rollout.n is batch.samples_per_prompt"):
        read_recipe(tmp_path / "verl.yaml")
