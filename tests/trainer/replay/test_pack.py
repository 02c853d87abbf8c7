"""A pack repeats a step in another folder and another process, names no secret, and a wrong one is refused."""

import errno
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import msgspec
import pytest
from support.actors import recipe_of
from support.policies import tiny_policy
from support.trained_run import stale_batch, trained_run

from headrace.comm.errors import SettingError
from headrace.comm.recipe import Recipe
from headrace.launch.report.replay import main
from headrace.trainer.replay import pack as pack_module
from headrace.trainer.replay import replay as replay_module
from headrace.trainer.replay.pack import FORMAT, opened_pack, settings_of
from headrace.trainer.replay.replay import NewPack, replay_pack, replay_steps

PATIENCE_S = 240.0
SETTINGS: dict[str, Any] = {"batch__prompts_per_step": 2, "sampling__max_new_tokens": 16, "optimizer__lr": 0.01}
KINDS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "lora": {"lora__rank": 2, "model__dtype": "bfloat16"},
    "gae": {"algorithm__advantage": "gae", "batch__updates_per_version": 2, "algorithm__clip_high": "inf"},
}


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), "qwen3")


def run_of(policy_dir: Path, run_dir: Path, **settings: object) -> Recipe:
    """The recipe of a run of four steps, with a checkpoint after the second."""
    recipe = recipe_of(policy_dir, **(SETTINGS | settings), run__dir=run_dir)
    steps = [[stale_batch(step, number, total=2) for number in range(2)] for step in range(4)]
    trained_run(recipe, steps, checkpoints=(2,))
    return recipe


@pytest.fixture(scope="module")
def run(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return run_of(policy_dir, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def packed(run: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of step 4."""
    path = tmp_path_factory.mktemp("pack") / "step.zip"
    assert replay_steps(run, (4, 4), new_pack=NewPack(path, "1.2.3")) == 0
    return path


def with_model(recipe: Recipe, path: Path | str) -> Recipe:
    return msgspec.structs.replace(recipe, model=msgspec.structs.replace(recipe.model, path=str(path)))


def replayed(path: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """`headrace replay` of a pack, in another process and another folder."""
    command = [sys.executable, "-m", "headrace", "replay", str(path), *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=path.parent, env=os.environ
    )


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_a_pack_repeats_the_step_of_the_run_elsewhere_bit_for_bit(policy_dir, tmp_path, settings):
    policy = tmp_path / "policy"
    shutil.copytree(policy_dir, policy)
    recipe = run_of(policy, tmp_path / "run", **settings)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[3])
    (elsewhere := tmp_path / "elsewhere").mkdir()
    assert replay_steps(recipe, (4, 4), new_pack=NewPack(elsewhere / "pack", "1.2.3")) == 0
    shutil.rmtree(policy)
    shutil.rmtree(tmp_path / "run")
    with ZipFile(elsewhere / "pack") as archive:
        numbers = json.loads(archive.read("metrics.jsonl"))
    assert numbers == {name: line[name] for name in numbers} and numbers["actor/grad_norm"] > 0
    done = replayed(elsewhere / "pack", "--with", "algorithm.loss=gspo algorithm.proximal=rollout")
    assert done.returncode == 0, done.stderr
    assert "step    4  loss" in done.stdout and "1 steps replayed, 0 of them differ" in done.stdout
    assert "variant 1 " in done.stdout
    assert [path.name for path in elsewhere.iterdir()] == ["pack"]


def test_a_pack_without_weights_repeats_the_step_with_the_checkpoint_alone(run, tmp_path, capsys):
    path = tmp_path / "pack"
    assert replay_steps(run, (3, 3), new_pack=NewPack(path, "1", has_weights=False)) == 0
    assert path.stat().st_size < 1e5
    checkpoint = Path(run.run.dir) / "checkpoints" / "step_2"
    with opened_pack(path) as (pack, folder):
        assert replay_pack(with_model(pack.recipe(folder), run.model.path), pack, folder, str(checkpoint)) == 0
        with pytest.raises(SettingError, match=r"the pack has no weights; .*--checkpoint RUN/checkpoints/step_2"):
            replay_pack(pack.recipe(folder), pack, folder)
    assert "step    3  loss" in capsys.readouterr().out


def test_the_weights_of_another_run_are_refused_by_their_digest(run, policy_dir, tmp_path):
    path = tmp_path / "pack"
    replay_steps(run, (3, 3), new_pack=NewPack(path, "1", has_weights=False))
    run_of(policy_dir, tmp_path / "other", optimizer__lr=0.02)
    with (
        opened_pack(path) as (pack, folder),
        pytest.raises(SettingError, match="these are not the weights of the pack"),
    ):
        recipe = with_model(pack.recipe(folder), policy_dir)
        replay_pack(recipe, pack, folder, str(tmp_path / "other" / "checkpoints" / "step_2"))


def test_a_pack_without_weights_of_the_first_step_needs_the_model_alone(run, policy_dir, tmp_path):
    path = tmp_path / "pack"
    replay_steps(run, (1, 1), new_pack=NewPack(path, "1", has_weights=False))
    with opened_pack(path) as (pack, folder):
        recipe = with_model(pack.recipe(folder), policy_dir)
        assert replay_pack(recipe, pack, folder) == 0
        with pytest.raises(SettingError, match="--checkpoint: step 1 begins with model.path"):
            replay_pack(recipe, pack, folder, "somewhere")


@pytest.mark.parametrize(
    ("steps", "has_weights", "why"),
    [
        ((3, 4), True, "a pack has one step; name it with --steps N"),
        (None, True, "a pack has one step"),
        ((4, 4), False, "step 4 does not begin with a checkpoint of the run.*the newest before it is step_2"),
    ],
)
def test_packs_that_cannot_be_made_are_refused(run, tmp_path, steps, has_weights, why):
    with pytest.raises(SettingError, match=why):
        replay_steps(run, steps, new_pack=NewPack(tmp_path / "pack", "1", has_weights))
    assert not list(tmp_path.iterdir())


def test_a_pack_does_not_replace_a_file_and_needs_its_folder(run, packed, tmp_path):
    for path, why in ((packed, "exists already"), (tmp_path / "none" / "pack", "there is no folder")):
        with pytest.raises(SettingError, match=why):
            replay_steps(run, (4, 4), new_pack=NewPack(path, "1"))


def test_a_pack_has_no_address_no_environment_no_folder_and_no_notes_of_rewards(
    policy_dir, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUDGE_KEY", "sk-of-the-environment")
    recipe = run_of(
        policy_dir, tmp_path / "private", reward__path="judge+http://user:sk-of-the-address@host/v1#model=m",
        data__path="/private/prompts.jsonl", eval__path="/private/held-out.jsonl",
    )  # fmt: skip
    path = tmp_path / "pack"
    replay_steps(recipe, (4, 4), new_pack=NewPack(path, "1"))
    content = path.read_bytes()
    for text in (b"sk-of-the", b"JUDGE_KEY", b"private", str(policy_dir).encode(), b"the run's own", b"reward_info"):
        assert text not in content, text
    assert b"rollout_logprobs" in content and b"importance_sampling_cap" in content


def test_a_pack_without_weights_has_the_name_of_a_folder_but_not_its_place():
    recipe = recipe_of(
        Path("/home/sender/policy"), lora__path="/home/sender/adapter", lora__rank=2, run__dir="/home/sender/run"
    )
    settings = settings_of(recipe, has_weights=False)
    assert settings["model"]["path"] == "policy" and settings["lora"]["path"] == "adapter"
    assert "sender" not in repr(settings)
    for path in ("org/model", "../policy"):
        assert settings_of(with_model(recipe, path), has_weights=False)["model"]["path"] == path


@pytest.mark.parametrize("function", ["sub/own.py:f", "/home/sender/own.py:f"])
@pytest.mark.parametrize("name", ["loss", "advantage"])
def test_of_an_own_function_a_pack_has_the_name_of_its_file(function: str, name: str):
    settings = settings_of(recipe_of(Path("org/model"), **{f"algorithm__{name}": function}), has_weights=True)
    assert settings["algorithm"][name] == "own.py:f"
    module = recipe_of(Path("org/model"), **{f"algorithm__{name}": "package.module:f"})
    assert settings_of(module, has_weights=True)["algorithm"][name] == "package.module:f"


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_pack_that_is_cut_short_is_refused(packed: Path, tmp_path: Path, share: float):
    content = packed.read_bytes()
    (cut := tmp_path / "pack").write_bytes(content[: int(share * len(content))])
    with pytest.raises(SettingError, match="is not a whole pack of .*cut short or damaged"), opened_pack(cut):
        pass


def test_a_damaged_byte_is_found(packed: Path, tmp_path: Path):
    content = bytearray(packed.read_bytes())
    content[len(content) // 2] ^= 1
    (damaged := tmp_path / "pack").write_bytes(content)
    with pytest.raises(SettingError, match="is not a whole pack .*Bad CRC-32"), opened_pack(damaged):
        pass


def test_a_damaged_directory_is_found(packed: Path, tmp_path: Path):
    """Its place becomes one before the file, where no file can be read."""
    content = bytearray(packed.read_bytes())
    content[content.rfind(b"PK\5\6") + 19] ^= 0xFF
    (damaged := tmp_path / "pack").write_bytes(content)
    with pytest.raises(SettingError, match="is not a whole pack .*cut short or damaged"), opened_pack(damaged):
        pass


@pytest.mark.parametrize("error", [OSError(errno.EINVAL, "Invalid"), struct.error("unpack requires 30 bytes")])
def test_what_reading_an_archive_raises_is_a_damage(packed: Path, monkeypatch: pytest.MonkeyPatch, error: Exception):
    monkeypatch.setattr(ZipFile, "read", failing_with(error))
    with pytest.raises(SettingError, match="is not a whole pack .*cut short or damaged"), opened_pack(packed):
        pass


def test_a_full_disk_is_no_damage_of_the_pack(packed: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ZipFile, "extractall", failing_with(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space left"), opened_pack(packed):
        pass


def failing_with(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def with_head(packed: Path, path: Path, **changes: object) -> Path:
    """A copy of a pack with other entries in its head."""
    with ZipFile(packed) as old, ZipFile(path, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "pack.json":
                content = json.dumps(json.loads(content) | changes).encode()
            new.writestr(name, content)
    return path


def test_packs_of_other_versions_are_refused_by_name(packed: Path, tmp_path: Path):
    later = with_head(packed, tmp_path / "later", format=FORMAT + 1, version="9.9")
    with pytest.raises(SettingError, match=r"was written by Headrace 9\.9 in form 2 of packs"), opened_pack(later):
        pass
    settings = {"algorithm": {"los": "clip"}}
    other = with_head(packed, tmp_path / "other", settings=settings, version="0.0.9")
    with (
        opened_pack(other) as (pack, folder),
        pytest.raises(SettingError, match=r"Headrace 0\.0\.9, with other settings"),
    ):
        pack.recipe(folder)
    without = with_head(packed, tmp_path / "without", step=None)
    with pytest.raises(SettingError, match="is not a whole pack"), opened_pack(without):
        pass


@pytest.mark.parametrize(
    ("section", "values", "named"),
    [
        ("trainer", {"engine": "own.py:Trainer"}, "trainer.engine"),
        ("reward", {"path": "own.py:reward"}, "reward.path"),
        ("model", {"path": "org/model"}, "model.path"),  # the weights are in the pack
        ("lab", {}, "lab"),
    ],
)
def test_settings_that_no_pack_has_are_refused(packed: Path, tmp_path: Path, section: str, values: Any, named: str):
    with ZipFile(packed) as archive:
        settings = json.loads(archive.read("pack.json"))["settings"]
    settings[section] = settings.get(section, {}) | values
    other = with_head(packed, tmp_path / "other", settings=settings)
    with (
        pytest.raises(SettingError, match=rf"with other settings than packs of this version: {re.escape(named)}$"),
        opened_pack(other),
    ):
        pass


def test_a_pack_is_replayed_by_the_built_in_trainer_alone(packed: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(packed), "trainer.engine=emulated"]) == 2
    assert "trainer.engine=emulated: only steps of the built-in trainer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_ranks", "why"),
    [(1, "roles.actor=2: step 4 was trained by 1 actor ranks"), (2, "rows/step_3.1.safetensors is missing")],
)
def test_more_ranks_than_a_pack_has_rows_of_are_refused_before_they_start(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, why: str
):
    monkeypatch.setattr(replay_module, "_train", failing_with(AssertionError("the ranks started")))
    with ZipFile(packed) as archive:
        settings = json.loads(archive.read("pack.json"))["settings"] | {"roles": {"actor": 2}}
    with opened_pack(with_head(packed, tmp_path / "other", settings=settings)) as (pack, folder):
        rows = folder / "rows" / "step_3.safetensors"
        said = rows.read_bytes()
        assert said.count(b'num_ranks\\":1') == 1
        rows.write_bytes(said.replace(b'num_ranks\\":1', b'num_ranks\\":%d' % num_ranks))
        with pytest.raises(SettingError, match=f"the pack is damaged: {why}"):
            replay_pack(pack.recipe(folder), pack, folder)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda _: "", "metrics.jsonl cannot be read"),
        (lambda row: row.replace("{", "", 1), "metrics.jsonl cannot be read"),
        (lambda _: "[]", "metrics.jsonl cannot be read"),
        (lambda row: row.replace('"step"', '"stop"'), "metrics.jsonl has no numbers of step 4"),
        (lambda row: row.replace('"step": 3', '"step": 2'), "metrics.jsonl has no numbers of step 4"),
        (lambda row: row.replace("is/mean", "is/mode"), "metrics.jsonl has no number is/mean"),
        (lambda row: row.replace('"actor/grad_norm": ', '"actor/grad_norm": "1", "x": '), "no number actor/grad_norm"),
    ],
)
def test_a_pack_without_its_numbers_is_refused(packed: Path, change: Callable[[str], str], why: str):
    with opened_pack(packed) as (pack, folder):
        metrics = folder / "metrics.jsonl"
        before = metrics.read_text()
        metrics.write_text(change(before))
        assert metrics.read_text() != before
        with pytest.raises(SettingError, match=f"the pack is damaged: .*{why}"):
            replay_pack(pack.recipe(folder), pack, folder)
        metrics.unlink()
        with pytest.raises(SettingError, match=r"the pack is damaged: metrics\.jsonl cannot be read"):
            replay_pack(pack.recipe(folder), pack, folder)


@pytest.mark.parametrize("name", ["../outside", "model/../../outside", "/outside", "run.py", "model/x/y"])
def test_files_that_no_pack_has_are_not_unpacked(packed: Path, tmp_path: Path, name: str):
    shutil.copy(packed, path := tmp_path / "pack")
    with ZipFile(path, "a") as archive:
        archive.writestr(name, b"x")
    with pytest.raises(SettingError, match="is not a pack"), opened_pack(path):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["pack"]


def test_a_compressed_archive_is_refused_before_it_is_read(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A small one could unpack to any size."""
    with ZipFile(packed) as old, ZipFile(path := tmp_path / "pack", "w", ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    monkeypatch.setattr(ZipFile, "open", failing_with(AssertionError("a file of the archive was opened")))
    with pytest.raises(SettingError, match=r"is not a pack.*: \S+ is compressed"), opened_pack(path):
        pass


def test_a_head_of_more_than_a_mebibyte_is_refused(packed: Path, tmp_path: Path):
    large = with_head(packed, tmp_path / "large", version="1" * (1 << 20))
    with (
        pytest.raises(SettingError, match=r"pack\.json has 1,0.* bytes, and 1,048,576 are allowed"),
        opened_pack(large),
    ):
        pass


def test_files_that_share_their_bytes_are_refused(packed: Path, tmp_path: Path):
    """Each has a sum that fits and a name of a pack; together they are larger than the pack."""
    with ZipFile(packed) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    shutil.copy(packed, path := tmp_path / "pack")
    with ZipFile(path, "a") as archive:
        archive.writestr("model/last", b"x")  # the directory is written again
        for number in range(packed.stat().st_size // largest.file_size + 1):
            archive.filelist.append(entry := copy(largest))
            entry.filename = f"model/{number}"
    with pytest.raises(SettingError, match="is not a pack.*: its files have .* bytes, and it has"), opened_pack(path):
        pass


@pytest.mark.parametrize(("change", "code"), [(1 + 1e-4, 0), (1.01, 1)])
def test_on_another_machine_small_differences_are_within_the_told_tolerance(
    packed: Path, tmp_path: Path, monkeypatch, capsys, change: float, code: int
):
    with ZipFile(packed) as archive:
        numbers = json.loads(archive.read("metrics.jsonl"))
    machine = pack_module.machine()
    other = with_head(packed, tmp_path / "other", machine=machine | {"torch": "0.1"})
    with opened_pack(other) as (pack, folder):
        moved = numbers | {"actor/grad_norm": numbers["actor/grad_norm"] * change}
        (folder / "metrics.jsonl").write_text(json.dumps(moved) + "\n")
        assert replay_pack(pack.recipe(folder), pack, folder) == code
    said = capsys.readouterr().out
    assert f"the pack is of another machine: torch 0.1 -> {machine['torch']}" in said
    assert ("within the tolerance of 0.001: actor/grad_norm" in said) is (code == 0)
    monkeypatch.setattr(replay_module, "machine", lambda: pack.machine)
    with opened_pack(other) as (pack, folder):
        (folder / "metrics.jsonl").write_text(json.dumps(moved) + "\n")
        assert replay_pack(pack.recipe(folder), pack, folder) == 1, "on the same machine every bit counts"


def test_a_pack_names_the_user_s_function_and_the_receiver_gives_its_file(policy_dir, tmp_path, capsys):
    loss = "import torch\n\n\ndef loss(x):\n    return -x.advantages * x.logprobs, torch.zeros_like(x.mask).bool()\n"
    (tmp_path / "own.py").write_text(loss)
    recipe = run_of(policy_dir, tmp_path / "run", algorithm__loss=f"{tmp_path}/own.py:loss")
    path = tmp_path / "pack"
    replay_steps(recipe, (4, 4), new_pack=NewPack(path, "1"))
    (tmp_path / "own.py").rename(tmp_path / "moved.py")
    capsys.readouterr()
    assert main([str(path)]) == 2
    assert "with own.py:loss, which is not in the pack; name the file on this machine" in capsys.readouterr().err
    assert str(tmp_path).encode() not in path.read_bytes(), "the sender's folders stay with the sender"
    assert main([str(path), f"algorithm.loss={tmp_path}/moved.py:loss"]) == 0
    assert "0 of them differ" in capsys.readouterr().out
