"""`--dry-run` plans a run for GPUs from `config.json` alone, and names the settings to change where they are too small."""

import json
import re

import pytest
from msgspec import structs

from headrace.comm.errors import SettingError
from headrace.comm.recipe import Recipe
from headrace.launch.config.dry_run import check_host
from headrace.launch.config.gpus import Gpus
from headrace.launch.config.hosts import equal_hosts
from headrace.launch.config.load import read_recipe
from headrace.launch.config.memory_plan import MemoryPlan
from headrace.launch.placement import count_ranks, place_ranks
from headrace.launch.run import main
from headrace.trainer.memory import CHECKPOINT_PARTS, COPY_PART

SMALL = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 32768,
}  # fmt: skip
LARGE = SMALL | {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
LONG = ("model.dtype=bfloat16", "sampling.max_new_tokens=2048")


@pytest.fixture
def dry_run(tmp_path, capsys):
    """Exit code and text of a dry run for a policy of this configuration; without weights and tokenizer."""

    def call(config, *words):
        (tmp_path / "config.json").write_text(json.dumps(config))
        code = main([f"model.path={tmp_path}", *words, "--dry-run"])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


def room_of(text):
    """The share of each kind of GPU that stays free, from lines such as `1 GPU: ... = 20.1 of 24.0 GB`."""
    sums = [line.rpartition("= ")[2].split() for line in text.splitlines() if " GB" in line and " = " in line]
    return [1 - float(used) / float(total) for used, _, total, _ in sums]


def test_7_billion_parameters_train_on_8_gpus_of_80_gb_with_room(dry_run):
    code, text = dry_run(LARGE, *LONG, "roles.actor=4", "roles.rollout=4", "--gpus=8x80")
    assert code == 0 and "activation checkpointing is on" in text and "7,615,616,512 parameters" in text
    assert len(room_of(text)) == 2 and min(room_of(text)) > 0.1


def test_half_a_billion_parameters_train_on_one_gpu_of_24_gb_with_room(dry_run):
    code, text = dry_run(SMALL, *LONG, "generator.gpu_share=0.3", "--gpus=1x24")
    assert code == 0 and "actor" in text
    assert len(room_of(text)) == 1 and room_of(text)[0] > 0.1


def test_whole_gradients_are_planned_where_ranks_sum_them_once(dry_run):
    def actor_line(*words):
        code, text = dry_run(SMALL, *LONG, "roles.actor=2", *words)
        assert code == 0
        return next(line for line in text.splitlines() if "moments" in line)

    assert "whole gradients 1.976" in actor_line("--gpus=3x80"), "4 bytes for each of 494M parameters"
    assert "whole gradients" not in actor_line("--gpus=3x14"), "no room"
    assert "whole gradients" not in actor_line("--gpus=2x80", "generator.gpu_share=0.3"), "a GPU has two processes"


@pytest.mark.parametrize(
    ("config", "words", "advice"),
    [
        (
            LARGE,
            ("roles.rollout=1", "--gpus=2x80"),
            "for actor, which needs .*: set a smaller optimizer.micro_tokens, lora.rank=16 .* or trainer.offload=true",
        ),
        (
            SMALL,
            ("generator.kv_gb=20", "--gpus=1x24"),
            "for actor and rollout, which need .*: set a smaller generator.kv_gb, .*, a larger rollout.tp or another generator.gpu_s",
        ),
        (
            LARGE,
            ("roles.rollout=1", "generator.gpu_share=0.15", "--gpus=2x80"),
            "weights of a rollout take .*: set .*a larger rollout.tp",
        ),
    ],
)
def test_a_gpu_that_is_too_small_is_refused_with_the_setting_to_change(dry_run, config, words, advice):
    code, text = dry_run(config, *LONG, *words)
    assert code == 2 and re.search(f"error: .*{advice}", text)


def test_a_rollout_has_one_size_in_the_plan(dry_run):
    _, text = dry_run(LARGE, *LONG, "roles.actor=4", "roles.rollout=4", "--gpus=8x80")
    each, on_gpu = (re.search(form, text) for form in (r"rollout +([\d.]+) GB each", r"4 GPUs: rollout ([\d.]+) ="))
    assert each and on_gpu and float(each[1]) == float(on_gpu[1]) == 68


def test_the_front_of_a_run_takes_memory_of_its_host(dry_run):
    for words, is_there in (((), False), (("rollout.serve=0",), True)):
        _, text = dry_run(SMALL, *LONG, *words, "--gpus=2x80")
        assert ("front 0.265" in text) == is_there, text


def test_offload_moves_weights_gradients_and_moments_to_the_host(dry_run):
    code, text = dry_run(LARGE, *LONG, "roles.rollout=1", "trainer.offload=true", "--gpus=2x80")
    assert code == 0
    assert "host memory: weights 30.462, gradients 30.462, moments 60.925, published weights 30.462" in text


@pytest.mark.parametrize("option", ["--gpus=80", "--gpus=0x80", "--gpus=1x-3", "--gpus=axb"])
def test_gpus_that_are_not_a_count_and_a_size_are_refused(dry_run, option):
    code, text = dry_run(SMALL, option)
    assert code == 2 and "COUNTxGB" in text


def test_rollouts_that_share_a_gpu_take_equal_parts_of_it(dry_run):
    code, text = dry_run(SMALL, *LONG, "roles.rollout=3", "--gpus=2x80")
    assert code == 0 and "1 GPU: rollout 34.0 + rollout 34.0 = 68.0 of 80.0 GB" in text
    assert "+ rollout 34.0 =" in next(line for line in text.splitlines() if "1 GPU: actor" in line)


def test_the_largest_micro_batch_is_the_last_doubling_that_the_memory_is_enough_for():
    words = [
        "model.dtype=bfloat16",
        "optimizer.micro_tokens=1024",
        "sampling.max_new_tokens=256",
        "batch.prompts_per_step=512",
    ]
    recipe = read_recipe(None, [*words, "batch.samples_per_prompt=8", "trainer.activation_checkpointing=true"])
    places = place_ranks(recipe.roles)
    names = tuple(str(place.slot) for place in places if place.slot is not None)

    def largest(gb: float, recipe: Recipe = recipe) -> int:
        return MemoryPlan.micro_tokens(recipe, SMALL, places, Gpus(names, gb))

    def is_enough(tokens: int, gb: float) -> bool:
        optimizer = structs.replace(recipe.optimizer, micro_tokens=tokens)
        return not MemoryPlan(structs.replace(recipe, optimizer=optimizer), SMALL, places, Gpus(names, gb)).shortages()

    assert largest(24) >= 2048 and is_enough(largest(24), 24) and not is_enough(2 * largest(24), 24)
    halved = structs.replace(recipe, optimizer=structs.replace(recipe.optimizer, micro_tokens=1 << 20))
    assert largest(24, halved) == largest(24)
    assert largest(10_000) == 1 << 20, "all tokens of a step: 512 prompts of 8 samples of 256"


def test_a_host_without_the_memory_for_its_processes_and_a_checkpoint_is_a_warning(tmp_path):
    recipe = read_recipe(None, LONG)
    places = place_ranks(recipe.roles)
    plan = MemoryPlan(recipe, SMALL, places, Gpus(("0", "1"), 80))
    state = plan.needs["actor"].host["copy for a checkpoint"]
    assert state > 12 * 0.9 * plan.sizes.num_parameters, "weights and two moments of four bytes each"
    refused, (tight,) = plan.host_shortages(state, state)
    assert "host 0 has 5.9 GB of memory" in tight and "GB of them for the copy of a checkpoint" in tight
    assert not refused and "set a smaller optimizer.micro_tokens" in tight
    assert plan.host_shortages(1e12, 1e12) == ([], [])
    _, (occupied,) = plan.host_shortages(1e12, 1e9)
    assert "1.0 GB of it free now" in occupied and "end other programs, or set" in occupied
    without = MemoryPlan(recipe, SMALL, places, Gpus((), 0))
    _, (tight,) = without.host_shortages(16e9, 16e9)
    need = float(tight.partition("processes need ")[2].split()[0])
    assert need > sum(each.host_bytes for each in without.needs.values()) / 1e9 + 8, (
        "without GPUs all of it is host memory"
    )
    refused, warned = without.host_shortages(6e9, 6e9)
    assert len(refused) == 1 and not warned, "weights, gradients and moments alone are more"


def test_with_actors_on_two_hosts_each_has_room_for_two_copies_of_another_ones_state():
    recipe = read_recipe(None, [*LONG, "roles.actor=2", "roles.relay=2"])
    alone, two = (
        MemoryPlan(recipe, SMALL, place_ranks(recipe.roles, hosts), Gpus((), 0)).needs["actor"].host
        for hosts in (equal_hosts(count_ranks(recipe.roles), count_ranks(recipe.roles) // number) for number in (1, 2))
    )
    assert two[COPY_PART] == 3 * alone[COPY_PART]


def test_where_there_is_no_room_for_a_second_copy_of_the_state_a_warning_says_what_the_run_does_without():
    recipe = read_recipe(None, LONG)
    plan = MemoryPlan(recipe, SMALL, place_ranks(recipe.roles), Gpus((), 0))
    copy = plan.needs["actor"].host[COPY_PART]
    assert copy == plan.needs["actor"].host[CHECKPOINT_PARTS[0]]
    need = next(float(line.split()[2]) for line in plan.lines() if line.endswith("are needed at most")) * 1e9
    assert plan.host_shortages(1e12, need + 1e6) == ([], [])
    refused, (warning,) = plan.host_shortages(1e12, need - 1e6)
    assert not refused and warning.endswith("a trainer that dies trains the steps since its last checkpoint again")
    _, (without_one,) = plan.host_shortages(1e12, need - copy - 1e6)
    assert "for the copy of a checkpoint" in without_one
    for words in ("run.save_rows=none", "trainer.engine=emulated"):
        other = read_recipe(None, [*LONG, words])
        assert COPY_PART not in MemoryPlan(other, SMALL, place_ranks(other.roles), Gpus((), 0)).needs["actor"].host


@pytest.mark.parametrize(("gb", "ends"), [(6, "refused"), (16, "warned"), (1000, "silent")])
def test_a_start_is_refused_for_what_certainly_does_not_fit_and_warned_about_an_estimate(
    tmp_path, monkeypatch, gb, ends
):
    monkeypatch.setattr(Gpus, "of_this_host", classmethod(lambda cls: cls()))
    monkeypatch.setattr("headrace.launch.config.dry_run.memory_bytes", lambda: int(gb * 1e9))
    monkeypatch.setattr("headrace.launch.config.dry_run.free_bytes", lambda: int(gb * 1e9))
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    recipe = read_recipe(None, [f"model.path={tmp_path}", *LONG])
    if ends == "refused":
        with pytest.raises(SettingError, match=r"weights and states .* need .*: set a smaller optimizer.micro_tokens"):
            check_host(recipe)
        return
    warnings, planned = check_host(recipe)
    about_memory = [warning for warning in warnings if "GB of memory" in warning]
    assert len(about_memory) == (ends == "warned") and {"actor-0", "rollout-0"} <= planned.keys()
    assert planned["actor-0"] > 8 * 0.49e9
