"""Reading a recipe: overrides, types, messages, the help page."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm.errors import SettingError
from headrace.comm.recipe import Recipe
from headrace.launch.config.help import field_docs, usage
from headrace.launch.config.load import (
    CONFIG_FILE,
    describe,
    known_settings,
    read_recipe,
    save_recipe,
    sections,
    show_value,
)
from headrace.launch.config.run_folder import make_run_folder


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("run.stpes=3", "unknown setting 'run.stpes'; the nearest is 'run.steps'"),
        ("steps=3", "unknown setting 'steps'; the nearest is 'run.steps'"),
        ("algorithm.scale_by_std=false", "it is algorithm.scale_rewards=group (true) or none (false) now"),
        ("trainer.lr=3", "the nearest is 'optimizer.lr'"),
        ("batch.samples=3", "the nearest is 'batch.samples_per_prompt'"),
        ("zzz.qq=3", "unknown setting 'zzz.qq'; --help lists all settings"),
        ("run=3", "'run' is a section; set one of its settings, such as run.dir"),
        ("run.dir.x=4", "run.dir is one value and has no settings of its own"),
        ("run.steps", "'run.steps' is not an override; write key=value"),
        ("run.steps=many", "run.steps=many is not allowed; it takes int >= 1"),
        (
            "run.report_to=[tensorboard,foo]",
            'run.report_to=["tensorboard","foo"] is not allowed; it takes list of one of mlflow, tensorboard,',
        ),
        ("run.steps=null", "run.steps=null is not allowed; it takes int >= 1"),
        ("run.steps=0", "run.steps=0 is not allowed; it takes int >= 1"),
        ("queue.max_staleness=x", "queue.max_staleness=x is not allowed; it takes int >= 0 or null"),
        ("data.shuffle=maybe", "data.shuffle=maybe is not allowed; it takes true or false"),
        ("run.resume=yes", "run.resume=yes is not allowed; it takes one of auto, never, restart"),
        (
            "batch.samples_per_prompt=4097",
            "batch.samples_per_prompt=4097 is not allowed; it takes int >= 1 and <= 4096",
        ),
        ("sampling.top_p=1.5", "sampling.top_p=1.5 is not allowed; it takes float > 0 and <= 1"),
        ("sampling.top_p=0", "sampling.top_p=0.0 is not allowed; it takes float > 0 and <= 1"),
        ("sampling.min_p=1", "sampling.min_p=1.0 is not allowed; it takes float >= 0 and < 1"),
        ("optimizer.beta1=1", "optimizer.beta1=1.0 is not allowed; it takes float >= 0 and < 1"),
        ("optimizer.beta2=1", "optimizer.beta2=1.0 is not allowed; it takes float >= 0 and < 1"),
        ("optimizer.lr=nan", "optimizer.lr=.nan is not allowed; it takes finite float >= 0"),
        ("optimizer.lr=inf", "optimizer.lr=inf is not allowed; it takes finite float >= 0"),
        ("optimizer.lr=-.inf", "optimizer.lr=-inf is not allowed; it takes finite float >= 0"),
        ("critic.lr=inf", "critic.lr=inf is not allowed; it takes finite float >= 0"),
        ("comm.deadline_s=inf", "comm.deadline_s=inf is not allowed; it takes float >= 0.1 and <= 1e+06"),
        ("reward.timeout_s=inf", "reward.timeout_s=inf is not allowed; it takes float > 0 and <= 1e+06"),
        ("algorithm.entropy_coef=nan", "algorithm.entropy_coef=.nan is not allowed; it takes finite float"),
        ("algorithm.entropy_coef=inf", "algorithm.entropy_coef=inf is not allowed; it takes finite float"),
        ("algorithm.clip_low=nan", "algorithm.clip_low=.nan is not allowed; it takes float >= 0"),
        ("reward.timeout_s=0", "reward.timeout_s=0.0 is not allowed; it takes float > 0 and <= 1e+06"),
        ("rollout.engine=sglang", "it takes one of builtin, vllm, emulated, FILE.py:CLASS"),
        ("comm.link=pigeon", "comm.link=pigeon is not allowed; it takes one of auto, nccl, shm, tcp"),
        ("data.chat_template_kwargs=x", "data.chat_template_kwargs=x is not allowed; it takes {name: value} or null"),
        ("sampling.stop=[x", "sampling.stop=[x is not allowed; it takes list of str"),
        ("queue.tasks=[{nam: x}]", "queue.tasks[0]: object contains unknown field `nam`"),
    ],
)
def test_the_message_for_a_wrong_override_names_the_setting(word: str, message: str):
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
        ("run: {", "recipe.yaml' is not YAML: line 1, column 7: "),
        (
            "run:\n\tsteps: 3",
            "recipe.yaml' is not YAML: line 2, column 1: found character '\\t' that cannot start any token",
        ),
        ("run: !!map steps", "is not YAML"),
        ("run: {steps: 3}\nrun: {seed: 1}", "'run' is there twice"),
        ("optimizer:\n  lr: 1e-3\n  lr: 1e-4", "is not YAML: line 3, column 3: 'lr' is there twice"),
    ],
)
def test_the_message_for_a_wrong_recipe_file_names_the_file(tmp_path: Path, text: str, message: str):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(SettingError, match="recipe.yaml|section") as caught:
        read_recipe(tmp_path / "recipe.yaml")
    assert message in str(caught.value)


def test_overrides_take_precedence_over_the_file_and_the_file_over_defaults(tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text("run: {steps: 7, seed: 8}\noptimizer: {lr: 2e-4}\n")
    recipe = read_recipe(tmp_path / "recipe.yaml", ["run.seed=9", "queue.max_staleness=5", "data.path=a=b.jsonl"])
    assert (recipe.run.steps, recipe.run.seed, recipe.optimizer.lr) == (7, 9, 2e-4)
    assert (recipe.queue.max_staleness, recipe.data.path, recipe.run.dir) == (5, "a=b.jsonl", Recipe().run.dir)


def test_a_word_for_a_list_of_words_is_a_list_of_one(tmp_path: Path):
    recipe = read_recipe(None, ["sampling.stop=#", "environment.tools=tools.py:search"])
    assert (recipe.sampling.stop, recipe.environment.tools) == (("#",), ("tools.py:search",))
    (tmp_path / "recipe.yaml").write_text("sampling: {stop: END}\n")
    assert read_recipe(tmp_path / "recipe.yaml").sampling.stop == ("END",)


def test_numbers_in_names_stay_text_and_null_unsets():
    recipe = read_recipe(None, ["run.dir=0012", "queue.max_staleness=5", "queue.max_staleness=null"])
    assert (recipe.run.dir, recipe.queue.max_staleness) == ("0012", None)


def test_the_type_of_a_setting_decides_the_meaning_of_a_word(tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(
        "optimizer: {lr: 1e-6, max_grad_norm: .inf}\nrun: {seed: 1_000, dir: on}\n"
        "queue: {max_staleness: ~, tasks: [{name: a, needs: [null_ids, 'null', 1e-6]}]}\nsampling: {stop: []}\n"
    )
    recipe = read_recipe(
        tmp_path / "recipe.yaml", ["data.shuffle=No", "sampling.stop=[x, 7]", "algorithm.clip_dual=1e6"]
    )
    assert (recipe.optimizer.lr, recipe.optimizer.max_grad_norm, recipe.algorithm.clip_dual) == (
        1e-6,
        float("inf"),
        1e6,
    )
    assert (recipe.run.seed, recipe.run.dir) == (1000, "on")
    assert (recipe.data.shuffle, recipe.queue.max_staleness, recipe.sampling.stop) == (False, None, ("x", "7"))
    assert recipe.queue.tasks[0].needs == ("null_ids", "null", "1e-6")


@settings(max_examples=30, deadline=None)
@given(
    st.text(st.characters(exclude_categories=["C"]), min_size=1).filter(lambda text: text not in ("null", "~")),
    st.integers(0, 2**31),
)
def test_a_saved_recipe_reads_as_itself(tmp_path_factory: pytest.TempPathFactory, name: str, seed: int):
    words = [f"model.path={name}", f"run.seed={seed}", f"run.dir={tmp_path_factory.mktemp('run')}"]
    recipe = read_recipe(
        None, [*words, "optimizer.eps=1e-9", "optimizer.max_grad_norm=inf", "sampling.stop=[a, 'null']"]
    )
    assert save_recipe(recipe) == Path(recipe.run.dir) / CONFIG_FILE
    assert read_recipe(Path(recipe.run.dir) / CONFIG_FILE) == recipe


def test_help_lists_every_setting_with_its_meaning():
    page = usage()
    for section, kind in sections():
        docs = field_docs(kind)
        for name, entry in known_settings().items():
            if name.startswith(f"{section}."):
                assert f"  {name}={show_value(entry.default)}  ({describe(entry.type)})\n" in page
                assert docs[entry.name].split()[0] in page


def test_a_new_run_folder_is_readable_as_the_umask_says_and_an_old_one_stays_as_it_is(tmp_path: Path):
    umask = os.umask(0o027)
    try:
        assert make_run_folder(tmp_path / "runs" / "new").stat().st_mode & 0o777 == 0o750
    finally:
        os.umask(umask)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    assert make_run_folder(tmp_path / "shared").stat().st_mode & 0o777 == 0o755
