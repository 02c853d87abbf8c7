"""The sensitivity of a comparison to the constants of emulated devices: which ones change, how, and the table."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from bench.schedules import compare, sensitivity
from bench.schedules.sensitivity import changed, changing

from headrace.launch.lab.experiment import Experiment
from headrace.launch.lab.figures import Figures
from headrace.launch.lab.settings import lab_of

RECIPE = Path(compare.__file__).parent / "recipes" / "emulated-16.yaml"


def test_all_constants_change_but_those_of_the_model():
    names = [*changing(lab_of({}))]
    assert {"host_ms", "kv_gb_s", "train_us", "trainer_ranks", "collectives_s", "chain_gb_s"} < {*names}
    assert not {"weights_gb", "kv_token_bytes", "gpus_per_rollout"} & {*names}
    assert "host_ms" not in [*changing(lab_of({"model": "7b"}))], "one GPU captures its steps, here and in the papers"


def test_a_constant_is_halved_doubled_and_as_in_the_papers():
    e = lab_of({"train_gpus": 73})
    assert [changed(e, "chain_gb_s", way) for way in sensitivity.WAYS] == [
        {"lab.chain_gb_s": 1.5}, {"lab.chain_gb_s": 6.0}, {"lab.chain_gb_s": 80.0},
    ]  # fmt: skip
    assert changed(e, "kv_tokens", "halved") == {"lab.kv_tokens": 350_000}
    assert [changed(e, "trainer_ranks", way) for way in sensitivity.WAYS] == [{}, {}, {"lab.trainer_ranks": 1}]
    assert [changed(e, "kv_gb_s", way) for way in sensitivity.WAYS] == [{}, {}, {"lab.kv_gb_s": 50.0}], "none are sent"
    assert changed(e, "weights_ms", "papers") == {}, "the same there"


def test_the_table_has_a_row_for_each_constant_and_the_ratios_of_the_same_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def run(experiment: Experiment, folder: str, settings: Mapping[str, object]) -> Figures:
        """A run whose speed depends on one constant, and for `partial` on none."""
        is_ours = settings["run.schedule"] == "headrace"
        speed = 100.0 * float(str(settings.get("lab.chain_gb_s", 3.0))) if is_ours else 150.0
        return Figures(speed, 1.0, 0.0, 0.0, 1.0, {"0": 1.0})

    monkeypatch.setattr(Experiment, "run", run)
    words = [
        str(RECIPE),
        f"run.dir={tmp_path}",
        "--gpus",
        "64",
        "--over",
        "partial",
        "--json",
        str(tmp_path / "a.json"),
    ]
    assert sensitivity.main(words) == 0
    lines = (tmp_path / "sensitivity.md").read_text().splitlines()
    assert lines[0] == "| constant | value | halved, over partial | doubled, over partial | papers, over partial |"
    assert lines[2] == "| as they are | - | 2.00 | 2.00 | 2.00 |"
    assert "| chain_gb_s | 3 | 1.00 | 4.00 | 53.33 |" in lines
    assert "| weights_ms | 9.9 | 2.00 | 2.00 | - |" in lines
    rows = {row["name"]: row["ratio"] for row in json.loads((tmp_path / "a.json").read_text())}
    assert rows["chain_gb_s-doubled"] == 4.0 and "weights_ms-papers" not in rows


def test_constants_of_real_devices_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("run: {steps: 3}\n")
    assert sensitivity.main([str(recipe)]) == 2
    assert "rollout.engine: the constants are those of emulated devices" in capsys.readouterr().err
