from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm.errors import SettingError
from headrace.launch.config import CONFIG_FILE, Recipe, read_recipe, save_recipe, sections, setting_names
from headrace.launch.usage import field_docs, usage


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("run.stpes=3", "unknown setting 'run.stpes'; the nearest is 'run.steps'"),
        ("steps=3", "unknown setting 'steps'; the nearest is 'run.steps'"),
        ("trainer.lr=3", "the nearest is 'optimizer.lr'"),
        ("zzz.qq=3", "unknown setting 'zzz.qq'; --help lists all settings"),
        ("run=3", "'run' is a section; set one of its settings, such as run.dir"),
        ("run.dir.x=4", "run.dir is one value and has no settings of its own"),
        ("run.steps", "'run.steps' is no override; write key=value"),
        ("run.steps=many", "run.steps takes int, not 'many'"),
        ("run.steps=null", "run.steps takes int, not null"),
        ("run.steps=0", "run.steps=0 must be at least 1"),
        ("queue.capacity=x", "queue.capacity takes int or null, not 'x'"),
        ("data.shuffle=maybe", "data.shuffle takes true or false, not 'maybe'"),
        ("run.resume=yes", "run.resume=yes is none of never, auto"),
        ("batch.samples_per_prompt=4097", "batch.samples_per_prompt=4097 must be at most 4096"),
        ("sampling.top_p=1.5", "sampling.top_p=1.5 must be at most 1"),
        ("run.dir=${run.nowhere}", "run.dir: Interpolation key 'run.nowhere' not found"),
    ],
)
def test_a_wrong_override_is_told_by_the_setting_to_change(word: str, message: str):
    with pytest.raises(SettingError) as caught:
        read_recipe(None, [word])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {stpes: 3}", "recipe.yaml: unknown setting 'run.stpes'; the nearest is 'run.steps'"),
        ("optimiser: {lr: 3}", "unknown setting 'optimiser.lr'; the nearest is 'optimizer.lr'"),
        ("run: 3", "'run' is a section"),
        ("- run", "must be a mapping of sections"),
        ("run: {", "is not YAML"),
    ],
)
def test_a_wrong_recipe_file_is_told_by_its_name(tmp_path: Path, text: str, message: str):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(SettingError, match="recipe.yaml|section") as caught:
        read_recipe(tmp_path / "recipe.yaml")
    assert message in str(caught.value)


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text("run: {steps: 7, seed: 8}\noptimizer: {lr: 2e-4}\n")
    recipe = read_recipe(tmp_path / "recipe.yaml", ["run.seed=9", "queue.capacity=5", "data.path=a=b.jsonl"])
    assert (recipe.run.steps, recipe.run.seed, recipe.optimizer.lr) == (7, 9, 2e-4)
    assert (recipe.queue.capacity, recipe.data.path, recipe.run.dir) == (5, "a=b.jsonl", Recipe().run.dir)


def test_numbers_in_names_stay_text_and_null_unsets():
    recipe = read_recipe(None, ["run.dir=0012", "queue.capacity=5", "queue.capacity=null"])
    assert (recipe.run.dir, recipe.queue.capacity) == ("0012", None)


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(exclude_categories=["C"], exclude_characters="$"), min_size=1), st.integers(0, 2**31))
def test_a_saved_recipe_reads_as_itself(tmp_path_factory: pytest.TempPathFactory, name: str, seed: int):
    recipe = read_recipe(None, [f"model.path={name}", f"run.seed={seed}"])
    recipe.run.dir = str(tmp_path_factory.mktemp("run"))
    assert save_recipe(recipe) == Path(recipe.run.dir) / CONFIG_FILE
    assert read_recipe(Path(recipe.run.dir) / CONFIG_FILE) == recipe


def test_help_lists_every_setting_with_its_meaning():
    page = usage()
    assert all(f"  {name}=" in page for name in setting_names())
    for _, kind in sections():
        for text in field_docs(kind).values():
            assert text.split()[0] in page
