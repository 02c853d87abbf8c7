"""The settings of the lab: read by the lab alone, with the same errors and help as a user's settings."""

import pytest
from msgspec import structs

from headrace.comm.errors import SettingError
from headrace.launch.config.help import usage
from headrace.launch.config.load import parse_recipe, read_recipe, recipe_yaml
from headrace.launch.lab.settings import help_lines, lab_fields, lab_of


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("lab.train_gpu=1", "unknown setting 'lab.train_gpu'; the nearest is 'lab.train_gpus'"),
        ("lab.xyz=1", "unknown setting 'lab.xyz'; headrace plan --help lists all"),
        ("lab.train_gpus=0", "lab.train_gpus=0 is not allowed; it takes int >= 1"),
        ("lab.kv_gb_s=inf", "lab.kv_gb_s=inf is not allowed; it takes finite float > 0 or null"),
        ("lab.profile=paper", "lab.profile=paper is not allowed; it takes one of measured, papers, program"),
        ("lab.profile=measured", "lab.profile=measured has no value of lab.host_ms; set it"),
        ("lab=1", "'lab' is a section; headrace plan --help lists its settings"),
    ],
)
def test_a_mistake_names_its_setting(word: str, message: str):
    with pytest.raises(SettingError) as told:
        lab_of(read_recipe(None, [word]).lab)
    assert str(told.value) == message


def test_values_have_the_types_of_their_settings_and_a_saved_recipe_keeps_them():
    recipe = read_recipe(None, ["lab.lengths=[3, 5]", "lab.colocated=yes", "lab.update_s=2", "lab.kv_gb_s=null"])
    settings = structs.replace(lab_of({}), lengths=(3, 5), colocated=True, update_s=2.0, kv_gb_s=None)
    assert lab_of(recipe.lab) == settings
    assert lab_of(parse_recipe(recipe_yaml(recipe)).lab) == settings


def test_the_labs_help_has_all_of_its_settings_and_the_users_help_none():
    listed = [line.split("=")[0].strip() for line in help_lines() if line.startswith("  lab.")]
    assert listed == [f"lab.{name}" for name in lab_fields()]
    assert "lab." not in usage().replace("launch.lab", "")


PAPERS = {
    "32b": {
        "gpus_per_rollout": 4, "weights_ms": 9.9, "request_us": 41.0, "kv_ns": 30.5, "prefill_us": 41.0, "kv_tokens": 700_000,
        "kv_token_bytes": 262_144, "train_us": 820.0, "weights_gb": 65.0,
    },
    "7b": {
        "gpus_per_rollout": 1, "weights_ms": 9.3, "request_us": 38.4, "kv_ns": 26.7, "prefill_us": 38.4, "kv_tokens": 818_000,
        "kv_token_bytes": 57_344, "train_us": 192.0, "weights_gb": 15.2,
    },
    "72b": {
        "gpus_per_rollout": 8, "weights_ms": 11.1, "request_us": 45.9, "kv_ns": 19.1, "prefill_us": 45.9, "kv_tokens": 1_072_000,
        "kv_token_bytes": 327_680, "train_us": 1836.0, "weights_gb": 145.4,
    },
}  # fmt: skip
"""The constants with which the figures of docs/reproduction.md were made, before there were profiles."""
IDEAL = {
    "step_ms": 0.0, "host_ms": 0.0, "kv_gb_s": 50.0, "trainer_ranks": 1, "collectives_s": 0.0, "update_s": 0.0, "micro_batch_s": 0.0,
    "push_gb_s": 100.0, "chain_gb_s": 80.0, "pull_gb_s": 25.0, "broadcast_gb_s": 54.0, "reshard_gb_s": 32.0, "prompt_tokens": 300,
    "median_tokens": 1600, "p99_over_median": 10.0,
}  # fmt: skip


@pytest.mark.parametrize("model", PAPERS)
def test_the_profile_of_the_papers_has_the_constants_of_the_published_figures(model: str):
    found = structs.asdict(lab_of({"profile": "papers", "model": model}))
    expected = PAPERS[model] | IDEAL
    assert {name: found[name] for name in expected} == expected


def test_the_programs_rollouts_launch_their_kernels_and_send_no_caches_where_they_have_several_gpus():
    one, four, eight = (lab_of({"model": model}) for model in ("7b", "32b", "72b"))
    assert [each.host_ms for each in (one, four, eight)] == pytest.approx([0, 64 * 0.2625, 80 * 0.2625])
    assert [each.kv_gb_s for each in (one, four, eight)] == [3.0, None, None]
    assert lab_of({"model": "7b", "gpus_per_rollout": 2}).host_ms > 0


def test_the_programs_trainer_has_a_rank_on_each_gpu_and_copies_its_shards_side_by_side():
    few, many = (lab_of({"train_gpus": gpus}) for gpus in (36, 584))
    assert (few.trainer_ranks, many.trainer_ranks) == (36, 584)
    assert many.push_gb_s / few.push_gb_s == pytest.approx(584 / 36)
    assert few.collectives_s == many.collectives_s > 0 and few.update_s > many.update_s > 0


def test_a_setting_of_the_recipe_wins_over_its_profile_and_changes_no_other():
    usual, given = (structs.asdict(lab_of(words)) for words in ({}, {"weights_gb": 1}))
    assert {name for name in usual if usual[name] != given[name]} == {"weights_gb"}
