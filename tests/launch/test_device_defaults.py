"""The settings that a recipe leaves to the devices: the compute type, and how many trajectories are decoded together."""

import json

import pytest

from headrace.comm.errors import SettingError
from headrace.launch.config.device_defaults import (
    multiplies_bfloat16,
    slow_type,
    with_device_defaults,
    with_slots,
)
from headrace.launch.config.gpus import Gpus
from headrace.launch.config.load import parse_recipe, read_recipe, recipe_yaml, save_recipe
from headrace.launch.report.replay import main as replay
from headrace.launch.resume import _changed
from headrace.launch.run import main

SMALL = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 32768,
}  # fmt: skip
CPU = Gpus()
GPU = Gpus(("0",), 24)
TWO = Gpus(("0", "1"), 24)


@pytest.fixture
def cpu(tmp_path, monkeypatch):
    """Makes this machine's CPU one with these lines in the kernel's description."""

    def become(*lines: str) -> None:
        file = tmp_path / "cpuinfo"
        file.write_text("".join(f"{line}\n" for line in lines))
        monkeypatch.setattr(multiplies_bfloat16, "__defaults__", (file,))

    return become


@pytest.mark.parametrize(
    ("line", "is_native"),
    [
        ("flags\t\t: fpu sse2 avx2 fma", False),
        ("flags\t\t: fpu avx2 avx512f avx512bw avx512_vnni", False),
        ("flags\t\t: fpu avx2 avx512bw avx512_bf16", True),
        ("flags\t\t: fpu avx2 avx512bw amx_bf16 amx_tile", True),
        ("Features\t: fp asimd fphp asimddp", False),
        ("Features\t: fp asimd i8mm bf16", True),
        ("Hardware\t: a machine that lists no features, and no bf16", False),
    ],
)
def test_a_cpu_computes_in_bfloat16_only_where_it_has_instructions_for_it(cpu, line, is_native):
    cpu("processor\t: 0", line, "bogomips\t: 5000")
    kind = "bfloat16" if is_native else "float32"
    assert with_device_defaults(read_recipe(None), CPU).model.compute_type == kind
    assert with_device_defaults(read_recipe(None), GPU).model.compute_type == "bfloat16"
    assert [len(list(slow_type(dtype))) for dtype in ("float32", "bfloat16")] == [0, not is_native]
    assert all("set model.dtype=float32" in warning for warning in slow_type("bfloat16"))


def test_a_machine_that_does_not_describe_its_cpu_computes_in_float32(tmp_path, monkeypatch):
    monkeypatch.setattr(multiplies_bfloat16, "__defaults__", (tmp_path / "none",))
    assert with_device_defaults(read_recipe(None), CPU).model.compute_type == "float32"


@pytest.mark.parametrize("gpus", [CPU, GPU])
def test_a_type_and_a_micro_batch_of_the_recipe_stay(cpu, gpus):
    cpu("flags : amx_bf16")
    given = read_recipe(None, ["model.dtype=float32", "optimizer.micro_tokens=77", "generator.max_running=5"])
    assert with_slots(with_device_defaults(given, gpus), gpus) == given


def test_emulated_devices_leave_the_recipe_as_it_is():
    recipe = read_recipe(None, ["rollout.engine=emulated", "trainer.engine=emulated"])
    assert with_slots(with_device_defaults(recipe, GPU), GPU) == recipe
    assert recipe.generator.num_slots == 32


@pytest.mark.parametrize(("first", "later"), [(CPU, GPU), (GPU, CPU)])
def test_a_run_that_goes_on_on_other_devices_keeps_its_type(cpu, run_dir, first, later):
    cpu("flags : avx2")
    begun = with_device_defaults(read_recipe(None, [f"run.dir={run_dir}"]), first)
    save_recipe(begun)
    resumed = with_device_defaults(read_recipe(None, [f"run.dir={run_dir}", "run.resume=auto"]), later)
    assert resumed.model == begun.model and "model.dtype" not in _changed(resumed)


def test_a_resumed_run_says_that_its_type_is_another_one_if_the_recipe_names_it(cpu, run_dir):
    cpu("flags : avx2")
    save_recipe(with_device_defaults(read_recipe(None, [f"run.dir={run_dir}"]), CPU))
    words = [f"run.dir={run_dir}", "run.resume=auto", "model.dtype=bfloat16"]
    assert _changed(with_device_defaults(read_recipe(None, words), CPU)) == ["model.dtype"]


def test_a_run_that_starts_again_takes_the_type_of_its_devices(cpu, run_dir):
    cpu("flags : avx2")
    save_recipe(with_device_defaults(read_recipe(None, [f"run.dir={run_dir}"]), GPU))
    again = read_recipe(None, [f"run.dir={run_dir}", "run.resume=restart"])
    assert with_device_defaults(again, CPU).model.compute_type == "float32"


def test_the_recipe_of_a_run_has_the_values_that_its_devices_chose(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    recipe = with_slots(with_device_defaults(read_recipe(None, [f"model.path={tmp_path}"]), GPU), GPU)
    saved = parse_recipe(recipe_yaml(recipe))
    assert (saved.model.dtype, saved.generator.max_running) == ("bfloat16", 128)


def slots(folder, gpus: Gpus, *words: str, hosts: tuple[int, ...] = ()) -> int:
    """`generator.max_running` of a policy of half a billion parameters on these GPUs, with responses of 16,384 tokens."""
    (folder / "config.json").write_text(json.dumps(SMALL))
    recipe = read_recipe(None, [f"model.path={folder}", "sampling.max_new_tokens=16384", *words])
    return with_slots(with_device_defaults(recipe, gpus), gpus, hosts).generator.num_slots


def test_a_gpu_decodes_as_many_trajectories_as_its_cache_holds_longest_responses(tmp_path):
    cache = 0.85 * 24e9 - (1 << 30) - 2 * 494e6  # the share of the GPU without CUDA's context and the weights
    row = 16384 * 24 * 2 * 128 * 2  # 24 layers, keys and values of 2 heads of 64, two bytes each
    assert slots(tmp_path, TWO) == int(cache / row)
    assert slots(tmp_path, TWO, "generator.kv_gb=1") == int(1e9 / row)
    assert slots(tmp_path, TWO, "sampling.max_new_tokens=131072") == int(cache / (2 * row)), "at most the context"
    assert slots(tmp_path, TWO, "generator.kv_gb=0.01") == 1
    assert slots(tmp_path, TWO, "sampling.max_new_tokens=64") == 128
    assert slots(tmp_path, GPU) < slots(tmp_path, TWO) / 2, "the trainer is on the same GPU"


def test_rollouts_on_two_hosts_do_not_share_a_gpu(tmp_path):
    roles = ("roles.actor=1", "roles.rollout=3", "roles.relay=2")
    assert slots(tmp_path, TWO, *roles, hosts=(3, 3)) == slots(tmp_path, TWO) > slots(tmp_path, TWO, *roles)


@pytest.mark.parametrize("gpus", [CPU, Gpus(("0",), 0.0)])
def test_without_a_gpu_of_known_size_32_trajectories_are_decoded_together(tmp_path, gpus):
    assert slots(tmp_path, gpus) == 32


def test_without_a_policy_the_number_of_a_cpu_stays():
    recipe = read_recipe(None, ["model.path=none"])
    assert with_slots(recipe, GPU).generator.num_slots == 32


def test_a_dry_run_prints_the_type_and_the_number_for_the_gpus_that_it_is_for(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    words = [f"model.path={tmp_path}", "sampling.max_new_tokens=16384", "generator.gpu_share=0.3"]
    assert main([*words, "--dry-run", "--gpus=1x24"]) == 0
    text = capsys.readouterr().out
    assert "GB as bfloat16" in text and f"1 rollouts x {slots(tmp_path, GPU, words[2])} = " in text


def test_the_launcher_replays_with_the_type_of_the_run_and_warns_of_another_one(cpu, run_dir, monkeypatch, capsys):
    cpu("flags : avx2")
    save_recipe(with_device_defaults(read_recipe(None, [f"run.dir={run_dir}"]), GPU))
    found = []
    monkeypatch.setattr(
        "headrace.trainer.replay.replay.replay_steps", lambda recipe, *_: found.append(recipe.model) or 0
    )
    assert replay([str(run_dir)]) == 0
    assert capsys.readouterr().err == ""
    assert replay([str(run_dir), "model.dtype=float32"]) == 0
    assert [model.compute_type for model in found] == ["bfloat16", "float32"]
    assert "model.dtype=float32: the steps" in (said := capsys.readouterr().err) and "trained with bfloat16" in said


def test_the_type_of_a_run_of_another_version_stays(cpu, run_dir):
    cpu("flags : avx2")
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("model: {dtype: float32}\ncomm: {delta: false}\n")
    with pytest.raises(SettingError):
        read_recipe(run_dir / "config.yaml")
    resumed = read_recipe(None, [f"run.dir={run_dir}", "run.resume=auto"])
    assert with_device_defaults(resumed, GPU).model.compute_type == "float32"


def test_a_saved_recipe_that_cannot_be_read_decides_nothing(cpu, run_dir):
    cpu("flags : avx2")
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("model: {dtype: float16}\n")
    with pytest.raises(SettingError):
        read_recipe(run_dir / "config.yaml")
    resumed = read_recipe(None, [f"run.dir={run_dir}", "run.resume=auto"])
    assert with_device_defaults(resumed, CPU).model.compute_type == "float32"
