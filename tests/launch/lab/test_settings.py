"""The settings of the lab: read by the lab alone, with the same errors and help as a user's settings."""

import pytest

from headrace.comm.errors import SettingError
from headrace.launch.config.help import usage
from headrace.launch.config.load import parse_recipe, read_recipe, recipe_yaml
from headrace.launch.lab.settings import LabSettings, help_lines, lab_fields, lab_of


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("lab.train_gpu=1", "unknown setting 'lab.train_gpu'; the nearest is 'lab.train_gpus'"),
        ("lab.xyz=1", "unknown setting 'lab.xyz'; headrace plan --help lists all"),
        ("lab.train_gpus=0", "lab.train_gpus=0 is not allowed; it takes int >= 1"),
        ("lab.kv_gb_s=inf", "lab.kv_gb_s=inf is not allowed; it takes finite float > 0"),
        ("lab=1", "'lab' is a section; headrace plan --help lists its settings"),
    ],
)
def test_a_mistake_names_its_setting(word: str, message: str):
    with pytest.raises(SettingError) as told:
        lab_of(read_recipe(None, [word]).lab)
    assert str(told.value) == message


def test_values_have_the_types_of_their_settings_and_a_saved_recipe_keeps_them():
    recipe = read_recipe(None, ["lab.lengths=[3, 5]", "lab.colocated=yes", "lab.update_s=2"])
    settings = LabSettings(lengths=(3, 5), colocated=True, update_s=2.0)
    assert lab_of(recipe.lab) == settings
    assert lab_of(parse_recipe(recipe_yaml(recipe)).lab) == settings


def test_the_labs_help_has_all_of_its_settings_and_the_users_help_none():
    listed = [line.split("=")[0].strip() for line in help_lines() if line.startswith("  lab.")]
    assert listed == [f"lab.{name}" for name in lab_fields()]
    assert "lab." not in usage().replace("launch.lab", "")
