"""Comparing schedules: figures from a run folder, the table and its rows, plots, and the command as a whole."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from bench.schedules import compare
from bench.schedules.compare import Variant, middle, rows_of, table, variants
from bench.schedules.figures import MoreFigures, more_figures, weight_wait_s
from bench.schedules.knobs import Knobs, key_of, read_tuned, save_tuned
from bench.schedules.paired_latency import PairedLatency, paired_table
from bench.schedules.plots import draw_comparison, draw_gantt
from bench.schedules.results import Result
from bench.schedules.scaling import curves_of, scaling_table
from support.emulated_run import EMULATED, FAST
from support.system import System

from headrace.comm.errors import SettingError
from headrace.comm.recipe import Recipe
from headrace.launch.config.load import read_recipe
from headrace.launch.lab.experiment import Experiment
from headrace.launch.lab.figures import Figures, Window, figures_of, window_of
from headrace.launch.lab.virtual.run import VirtualRun
from headrace.launch.processes.rank import prepare
from headrace.launch.report.timeline import Span, Timeline

RECIPE = Path(compare.__file__).parent / "recipes" / "emulated-16.yaml"


def result(tokens_per_s: float, *, weight_wait_s: float = 10.0, kv_util: float = 0.5) -> Result:
    figures = Figures(
        tokens_per_s=tokens_per_s,
        step_s=100.0,
        idle_actor=0.1,
        idle_rollout=0.2,
        latency_s=80.0,
        staleness={"0": 0.5, "2": 0.5},
    )
    more = MoreFigures(kv_util, 0.1, weight_wait_s, 300.0, whole_tokens_per_s=tokens_per_s / 2)
    return Result(Path("runs/x"), 8, 32, figures, more)


def virtual_run(folder: Path, **settings: object) -> Recipe:
    """A short run in virtual time; keys have `__` for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.jsonl").write_text('{"prompt": "p"}\n' * 64)
    named = {key.replace("__", "."): value for key, value in settings.items()}
    words = EMULATED | {"run.dir": folder, "data.path": folder / "prompts.jsonl"} | named
    recipe = read_recipe(None, [f"{key}={value}" for key, value in words.items()])
    VirtualRun(recipe).run()
    return recipe


def generate(version: int, start: float, end: float) -> Span:
    return Span("generate", start, end, {"version": version})


def test_waiting_for_weights_lasts_from_the_end_of_one_version_until_the_next_generates():
    spans = [
        generate(0, 0, 100),
        Span("idle", 100, 130, {"version": 0}),
        Span("pull", 130, 131, {}),
        generate(1, 135, 200),
        Span("idle", 200, 220, {"version": 1}),  # no prompts; it continues on the same weights
        generate(1, 220, 300),
        Span("pull", 300, 302, {}),
        generate(2, 302, 400),
    ]
    assert weight_wait_s(spans, Window(0, 1, 0, 1000)) == pytest.approx(35 + 2)
    assert weight_wait_s(spans, Window(0, 1, 110, 301)) == pytest.approx(25 + 1)


def test_rows_compare_with_the_peer_of_the_same_run():
    results = {
        "sync-colocated": result(1000),
        "one_step": result(1200, weight_wait_s=40),
        "partial": result(1500),
        "headrace": result(1800, weight_wait_s=10),
        "repack-off": result(100, kv_util=0.4),
        "repack-on": result(120, kv_util=0.5),
    }
    ratios = {row.name: row.ratio for row in rows_of(results, 64)}
    assert ratios == pytest.approx(
        {
            "sync-colocated-64gpus": 1.0,
            "one_step-64gpus": 1.2,
            "partial-64gpus": 1.5,
            "headrace-64gpus": 1.8,
            "headrace-over-partial-64gpus": 1.2,
            "weight-wait-64gpus": 0.25,
            "repack-tokens": 1.2,
            "repack-kv-utilisation": 1.25,
        }
    )
    assert math.isnan(next(rows_of({"headrace": result(1)}, 64)).ratio)


def test_a_schedules_share_of_perfect_scaling_is_that_of_its_tokens_per_device():
    few = {"sync-colocated": result(1000).figures, "headrace": result(1200).figures, "partial": result(1).figures}
    many = {"sync-colocated": result(2000).figures, "headrace": result(4800).figures}
    curves = curves_of({256: many, 64: few})
    assert curves == {"sync-colocated": {64: 1000, 256: 2000}, "headrace": {64: 1200, 256: 4800}}
    lines = scaling_table(curves, "sync-colocated").splitlines()
    assert lines[0] == "| schedule | 64 GPUs | 256 GPUs |"
    assert lines[2] == "| sync-colocated | 1,000 (1.00, 100%) | 2,000 (1.00, 50%) |"
    assert lines[3] == "| headrace | 1,200 (1.20, 100%) | 4,800 (2.40, 100%) |"
    assert "| 4,800 (100%) |" in scaling_table({"headrace": curves["headrace"]}, "sync-colocated")
    starred = scaling_table(curves, "sync-colocated", {("headrace", 256)}).splitlines()
    assert starred[2:] == [lines[2], f"{lines[3][:-2]}* |"]


def test_an_ablation_shows_the_gain_of_each_schedule_over_the_one_before():
    results = {"sync": result(1000), "stream_sync": result(1250), "stream": result(1500), "headrace": result(1800)}
    assert [line.split("|")[3:5] for line in compare.ablation(results).splitlines()[3:]] == [
        [" 1.00 ", " +0.0% "],
        [" 1.25 ", " +25.0% "],
        [" 1.50 ", " +20.0% "],
        [" 1.80 ", " +20.0% "],
    ]
    assert compare.ablation({"sync": result(1)}) == ""


def test_a_row_of_too_few_steps_for_its_staleness_is_marked():
    short = replace(result(1000), more=result(1000).more._replace(is_settled=False))
    lines = table({"headrace": short, "partial": result(1000)}).splitlines()
    assert "| 100 TOO FEW STEPS |" in lines[2] and "TOO FEW" not in lines[3]


def test_a_row_has_the_whole_run_beside_its_measured_part():
    base, ours = result(1000), result(1800)
    ours = replace(ours, more=ours.more._replace(whole_tokens_per_s=1100))
    assert "| 1,800 | 1.80 | 1,100 (2.20) |" in table({"sync-colocated": base, "headrace": ours})


def test_staleness_is_bounded_at_four_beside_the_default():
    bounded, free = variants(str(RECIPE), ["headrace-4", "headrace"], 64, 4)
    assert bounded.settings == free.settings | {"queue.max_staleness": 4}


def test_bounded_staleness_has_its_own_tuned_knobs(tmp_path: Path):
    recipe = str(tmp_path / "devices.yaml")
    (tmp_path / "devices.yaml").write_text("rollout: {engine: emulated}\ntrainer: {engine: emulated}\n")
    found: list[list[Knobs]] = []
    for name, knobs in (("headrace", Knobs(7)), ("headrace-4", Knobs(6, max_running=96))):
        save_tuned(recipe, "program", key_of(64, 0), name, knobs)
        found.append([variant.knobs for variant in variants(recipe, ["headrace", "headrace-4"], 64, 4)])
    assert found == [[Knobs(7), Knobs(7)], [Knobs(7), Knobs(6, max_running=96)]]


def test_of_several_seeds_the_table_shows_the_median_and_the_spread():
    chosen = middle([result(1400, kv_util=0.9), result(1000), result(1100, kv_util=0.7)])
    assert (chosen.more.kv_util, chosen.speeds) == (0.7, (1000, 1100, 1400))
    assert "| 1,100 (1,000 to 1,400) |" in table({"headrace": chosen})
    assert "| 1,000 |" in table({"headrace": middle([result(1000)])})


def test_devices_are_split_and_the_batch_scaled_to_them():
    (colocated,) = variants(str(RECIPE), ["sync-colocated"], 64, 4)
    assert (colocated.knobs.rollouts, colocated.settings["lab.train_gpus"]) == (16, 64)
    stream = Variant("stream", 128, Knobs(10), 4)
    assert stream.settings["lab.train_gpus"] == 88 and stream.settings["batch.prompts_per_step"] == 512
    off, on = variants(str(RECIPE), ["repack-off", "repack-on"], 64, 4)
    assert off.settings == on.settings | {"repack.period_s": 0}
    assert (off.knobs.rollouts, off.settings["lab.train_gpus"]) == (16, 256)


@pytest.mark.parametrize("tuning", [(), ("--tune", "2")])
def test_devices_that_cannot_be_divided_are_refused_before_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tuning: tuple[str, ...]
):
    words = [str(RECIPE), f"run.dir={tmp_path}", "--gpus", "4", "--only", "sync-colocated", "headrace", *tuning]
    assert compare.main(words) == 2
    assert "--gpus: of 4 GPUs headrace would have 0 rollouts of 4 GPUs, and 4 GPUs" in capsys.readouterr().err
    assert not list(tmp_path.glob("*/outcome.json"))


def test_tuned_knobs_are_those_of_the_recipes_own_devices_and_a_knob_that_is_given_wins(tmp_path: Path):
    recipe = str(tmp_path / "devices.yaml")
    (tmp_path / "devices.yaml").write_text("rollout: {engine: emulated}\ntrainer: {engine: emulated}\n")
    save_tuned(recipe, "program", key_of(64, 0), "headrace", Knobs(7, max_running=192, lead=512))

    def knobs(*overrides: str, name: str = "headrace") -> Knobs:
        (variant,) = variants(recipe, [name], 64, 4, overrides=overrides)
        return variant.knobs

    assert knobs("run.steps=9") == Knobs(7, max_running=192, lead=512)
    assert knobs("lab.profile=papers") == Knobs(8), "another profile has other devices"
    for other in ("lab.gpus_per_rollout=16", "batch.samples_per_prompt=4", "sampling.max_new_tokens=9"):
        assert knobs(other) == Knobs(8)
    assert knobs("generator.max_running=96") == Knobs(7, lead=512)
    assert knobs("roles.rollout=9", "queue.lead=8") == Knobs(9, max_running=192)
    assert knobs("roles.rollout=9", name="sync-colocated") == Knobs(16), "all GPUs generate"


@pytest.mark.parametrize("given", ["generator.max_running=96", "lab.train_us=99"])
def test_tuning_beside_settings_that_the_recipe_lacks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
):
    words = [str(RECIPE), f"run.dir={tmp_path}", given, "--tune", "2", "--only", "headrace"]
    assert compare.main(words) == 2
    assert f"set {given.partition('=')[0]} in the recipe itself" in capsys.readouterr().err


def test_every_variant_is_a_valid_recipe(tmp_path: Path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    for variant in variants(str(RECIPE), [*compare.SCHEDULES, *compare.REPACK], 64, 4):
        words = [f"{key}={value}" for key, value in variant.settings.items()]
        words += [f"run.dir={tmp_path / variant.folder}", f"data.path={tmp_path / 'prompts.jsonl'}"]
        prepare(read_recipe(RECIPE, words)).close()


def test_a_finished_run_gives_its_figures_and_plots(tmp_path: Path):
    words = {**FAST, "run.steps": 7, "run.schedule": "one_step"}
    system = System(tmp_path, **words).start_all(num_rollouts=2)
    system.wait()
    timeline = Timeline.read(system.dir)
    figures = figures_of(system.dir, timeline, window_of(timeline, 7))
    more = more_figures(system.dir, figures, prefill_s=1e-4)
    assert set(figures.staleness) <= {"0", "1"} and 0 <= more.kv_util < 1
    assert more.recompute_share == 0, "nothing changes midway"
    assert 0 < figures.idle_actor < 1 and 0 < figures.idle_rollout < 1
    assert more.weight_wait_s > 0, "the broadcast, and the barrier before it; the window's ends may cut a wait"
    assert 0 < figures.latency_s <= more.longest_s
    draw_gantt(timeline, "one_step", tmp_path / "gantt.png")
    once = Result(system.dir, 2, 32, figures, more)
    draw_comparison({"one_step": once, "again": once}, tmp_path / "compare.png")
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("gantt.png", "compare.png"))


def test_a_comparison_of_real_devices_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("run: {steps: 3}\n")
    assert compare.main([str(recipe)]) == 2
    assert "rollout.engine: a comparison of schedules needs emulated devices" in capsys.readouterr().err


def test_a_comparison_without_a_seed_is_refused(capsys: pytest.CaptureFixture[str]):
    assert compare.main([str(RECIPE), "--seeds", "0"]) == 2
    assert "--seeds: at least 1" in capsys.readouterr().err


def test_a_comparison_names_settings_of_which_each_row_has_its_own(capsys: pytest.CaptureFixture[str]):
    assert compare.main([str(RECIPE), "batch.prompts_per_step=8", "lab.colocated=true", "--gpus", "4"]) == 2
    assert "no effect: batch.prompts_per_step, lab.colocated; each row has its own" in capsys.readouterr().err


def test_an_unfinished_run_is_named_and_not_run_over(tmp_path: Path):
    experiment = Experiment(str(RECIPE), [], tmp_path)
    (tmp_path / "headrace").mkdir()
    (tmp_path / "headrace" / "journal.jsonl").touch()
    with pytest.raises(SettingError, match="headrace has not finished; remove that folder"):
        experiment.run("headrace", {})


def test_two_schedules_are_run_compared_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = [
        str(RECIPE), f"run.dir={tmp_path / 'runs'}", "run.steps=6", "lab.median_tokens=60",
        "sampling.max_new_tokens=600", "batch.samples_per_prompt=2", "--gpus", "12", "--only", "sync-colocated",
        "headrace", "--json", str(tmp_path / "rows.json"),
    ]  # fmt: skip
    assert compare.main(words) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert rows["sync-colocated-12gpus"]["ratio"] == 1.0 and rows["headrace-12gpus"]["value"] > 0
    capsys.readouterr()
    assert compare.main(words) == 0, "finished runs are read again"
    assert "runs" not in capsys.readouterr().err
    assert len(list((tmp_path / "runs").glob("*/gantt.png"))) == 2


def test_latencies_are_compared_trajectory_by_trajectory(tmp_path: Path):
    slower = {
        "lab__weights_ms": 19.8,
        "lab__request_us": 82,
        "lab__kv_ns": 61,
        "lab__prefill_us": 82,
    }
    results: list[Result] = []
    for name, device in (("one", {}), ("slower", slower)):
        folder = tmp_path / name
        virtual_run(folder, run__schedule="sync", run__steps=7, **device)
        timeline = Timeline.read(folder)
        figures = figures_of(folder, timeline, window_of(timeline, 7))
        results.append(Result(folder, 2, 32, figures, more_figures(folder, figures, 0.0)))
    pairs = PairedLatency.of(tmp_path / "slower", tmp_path / "one")
    assert pairs.num == 2 * 16, "two steps are measured"
    assert pairs[1:] == pytest.approx([2] * 4, rel=0.05)
    ratios = paired_table(*results).splitlines()[-1]
    assert ratios.startswith("| ratio | 2 + 32 | 0.5")
    assert ratios.endswith(f"| {pairs.mean:.3f} | {pairs.p50:.3f} | {pairs.p99:.3f} | {pairs.longest:.3f} | 32 |")


def test_schedules_are_compared_in_virtual_time_at_a_fixed_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = [
        str(RECIPE), f"run.dir={tmp_path / 'runs'}", "run.steps=6", "batch.samples_per_prompt=2", "--gpus", "16", "32",
        "--fixed-batch", "16", "--only", "sync-colocated", "partial", "headrace",
        "--json", str(tmp_path / "rows.json"),
    ]  # fmt: skip
    assert compare.main(words) == 0
    ratios = {row["name"]: row["ratio"] for row in json.loads((tmp_path / "rows.json").read_text())}
    assert Counter(name.split("-")[-1] for name in ratios) == {"16gpus": 4, "32gpus": 4}
    assert ratios["headrace-over-partial-16gpus"] > 0 and ratios["sync-colocated-32gpus"] == 1.0
    assert "| partial |" in capsys.readouterr().out
    assert "| schedule | 16 GPUs | 32 GPUs |" in (tmp_path / "runs" / "scaling.md").read_text()
    assert (tmp_path / "runs" / "scaling.png").stat().st_size > 5000


def test_a_run_whose_trajectories_last_for_several_steps_needs_more_steps(tmp_path: Path):
    for length, median, train_us in (("long", 600, 100), ("short", 60, 100_000)):
        words = {"lab__median_tokens": median, "lab__train_us": train_us, "run__steps": 10}
        virtual_run(tmp_path / length, roles__rollout=4, **words)
        timeline = Timeline.read(tmp_path / length)
        figures = figures_of(tmp_path / length, timeline, window_of(timeline, 10))
        more = more_figures(tmp_path / length, figures, 0.0)
        assert more.is_settled == (length == "short"), "of 10 steps, 4 and 2 do not count"


def test_an_entrant_is_tuned_within_its_budget_and_then_compared_with_several_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    recipe = tmp_path / "devices.yaml"
    recipe.write_text(RECIPE.read_text().replace("samples_per_prompt: 16", "samples_per_prompt: 2"))
    words = [
        str(recipe), f"run.dir={tmp_path / 'runs'}", "run.steps=6", "--gpus", "16",
        "--fixed-batch", "16", "--only", "partial", "--tune", "3", "--seeds", "2",
    ]  # fmt: skip
    assert compare.main(words) == 0
    folders = {path.parent.name for path in (tmp_path / "runs").glob("*/outcome.json")}
    assert len(folders) == 3 + 1, "the budget, and the second seed of the best"
    chosen = read_tuned(str(recipe))["program"]["16-16groups"]["partial"]
    out = capsys.readouterr().out
    assert f"| {str(chosen) or '-'} |" in out and " to " in out.splitlines()[-1]
