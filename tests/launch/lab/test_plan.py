"""Planning a run: devices measured from a run folder, the search over splits, and the command as a whole."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import structs
from support.emulated_run import EMULATED

from headrace.comm.recipe import Recipe
from headrace.launch.config.checks.recipe import check_settings
from headrace.launch.config.load import read_recipe, recipe_yaml, save_recipe
from headrace.launch.lab.command import main
from headrace.launch.lab.devices import Devices
from headrace.launch.lab.plan import MeasuredJob, Simulation, proposal
from headrace.launch.lab.profile import (
    MOST_LENGTHS,
    emulated_recipe,
    equal_parts,
    line_through,
    profile_of,
    relay_seconds,
    training_costs,
)
from headrace.launch.lab.settings import lab_of
from headrace.launch.lab.tuning import Knobs
from headrace.launch.lab.virtual.run import VirtualRun
from headrace.launch.report.planned import PREDICTION_FILE, Prediction, job_digest
from headrace.relay.queue.schedules import SCHEDULES

DEVICES = {
    "lab.step_ms": 4,
    "lab.weights_ms": 0,
    "lab.request_us": 300,
    "lab.kv_ns": 500,
    "lab.prefill_us": 70,
    "lab.prompt_tokens": 40,
    "lab.kv_tokens": 90_000,
    "lab.train_us": 50_000,
    "lab.update_s": 1.5,
    "lab.weights_gb": 13,
    "lab.stretch": 1,
    "lab.median_tokens": 60,
    "sampling.max_new_tokens": 300,
    "lab.gpus_per_rollout": 1,
    "lab.train_gpus": 3,
}


def recipe_of(folder: Path, **settings: object) -> Recipe:
    """A small job on 6 GPUs; keys have `__` for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.jsonl").write_text('{"prompt": "p"}\n' * 64)
    named = {key.replace("__", "."): value for key, value in settings.items()}
    rest = {"roles.rollout": 3, "run.steps": 14, "run.dir": folder, "data.path": folder / "prompts.jsonl"}
    return read_recipe(None, [f"{key}={value}" for key, value in (EMULATED | DEVICES | rest | named).items()])


def run_of(folder: Path, **settings: object) -> Recipe:
    """The recipe of a run in virtual time, which is in the folder."""
    recipe = recipe_of(folder, **settings)
    save_recipe(recipe)
    VirtualRun(recipe).run()
    return recipe


def as_measured(folder: Path, recipe: Recipe) -> None:
    """Write what a real run reports and a virtual one does not: the bytes of its weights, and how busy its relay is."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    real = {"weights/bytes": lab_of(recipe.lab).weights_gb * 1e9, "idle/relay": 0.96}
    path.write_text("".join(json.dumps(line | real) + "\n" for line in lines))


def test_the_profile_of_a_run_has_the_settings_of_its_devices(tmp_path: Path):
    recipe = run_of(tmp_path)
    as_measured(tmp_path, recipe)
    # Rows of three trainer ranks, as a real run has them.
    real = structs.replace(recipe, roles=structs.replace(recipe.roles, actor=3))
    found, true = profile_of(tmp_path, real), lab_of(recipe.lab)
    names = ("step_ms", "request_us", "kv_ns", "train_us", "prompt_tokens", "kv_tokens", "train_gpus", "pull_gb_s")
    assert {name: getattr(found, name) for name in names} == pytest.approx(
        {name: getattr(true, name) for name in names}, rel=0.03
    )
    assert found.prefill_us == pytest.approx(true.prefill_us, rel=0.3)
    assert found.update_s == pytest.approx(true.update_s, rel=0.05)
    assert found.push_gb_s == pytest.approx(true.push_gb_s, rel=0.05)


def test_the_profile_of_a_resumed_run_is_of_its_last_start(tmp_path: Path):
    recipe = run_of(tmp_path, run__steps=8)
    as_measured(tmp_path, recipe)
    undisturbed = profile_of(tmp_path, recipe)
    trace = tmp_path / "trace" / "actor-0.jsonl"
    head, *spans = trace.read_text().splitlines()
    earlier = json.loads(head)
    earlier["wall"] -= 50_000.0
    trace.write_text("\n".join([json.dumps(earlier), *spans, head, *spans]) + "\n")  # the resumed run repeats all steps
    assert profile_of(tmp_path, recipe) == undisturbed


def test_a_simulation_of_the_measured_devices_repeats_the_run(tmp_path: Path):
    recipe = run_of(tmp_path / "run")
    as_measured(tmp_path / "run", recipe)
    real = structs.replace(
        recipe,
        roles=structs.replace(recipe.roles, actor=3),
        rollout=structs.replace(recipe.rollout, engine="builtin"),
    )
    own = emulated_recipe(real, profile_of(tmp_path / "run", real))
    again, run = (Simulation.of(Devices.of(each), tmp_path / "plan") for each in (own, recipe))
    predicted, measured = (each.figures(each.devices.own) for each in (again, run))
    assert predicted.tokens_per_s == pytest.approx(measured.tokens_per_s, rel=0.05)
    assert predicted.idle_rollout == pytest.approx(measured.idle_rollout, abs=0.05)
    job = MeasuredJob(real, relay_seconds(tmp_path / "run", real.roles.relay or 1))
    *_, weights, relays, micro_batches, settings = proposal(again, again.devices.own, job)
    assert weights.startswith("weights: ") and micro_batches.startswith("micro-batches: ")
    assert relays.startswith("relays: 1, busy 4.") and relays.endswith("needed: 1")
    assert settings.startswith("settings: run.schedule=headrace roles.actor=3 roles.relay=null roles.rollout=3 ")


def test_relays_are_added_where_the_present_ones_would_be_busy_for_half_of_their_time():
    def with_relays(number: int | None, measured: int = 1) -> MeasuredJob:
        roles = structs.replace(Recipe().roles, relay=number)
        return MeasuredJob(structs.replace(Recipe(), roles=roles), 1e-3, measured)

    assert with_relays(1).relays(400) == pytest.approx((1, 0.4))
    assert with_relays(1).relays(600) == pytest.approx((3, 0.6)), "beside a second one each row has two copies"
    assert with_relays(2, measured=2).relays(1200) == pytest.approx((3, 0.6)), "the run had two copies"
    assert with_relays(2, measured=1).relays(400) == pytest.approx((2, 0.4)), "a second copy, on a second relay"
    assert with_relays(1, measured=2).relays(1200) == pytest.approx((3, 0.6)), "half of the work for one copy"


def test_without_a_number_of_relays_there_are_as_many_as_in_the_measured_run():
    job = MeasuredJob(Recipe(), relay_s=1e-3, measured_relays=4)
    assert job.recipe.roles.relay is None and job.relays(1600) == pytest.approx((4, 0.4)), "one on each of four hosts"
    assert job.relays(2400) == pytest.approx((5, 0.6))


def test_the_time_of_a_micro_batch_is_told_where_their_number_varies_beside_the_tokens():
    random = np.random.default_rng(0)
    tokens, counts = random.uniform(1000, 5000, 30), random.integers(2, 9, 30).astype(float)
    exact = 0.5 + 1e-3 * tokens + 0.2 * counts
    assert training_costs(tokens, counts, exact) == pytest.approx((0.5, 1e-3, 0.2))
    noise = random.normal(0, 0.05, 30)
    assert training_costs(tokens, counts, exact + noise) == pytest.approx((0.5, 1e-3, 0.2), rel=0.2)
    assert training_costs(tokens, counts, 0.5 + 1e-3 * tokens + noise)[2] == 0.0, "nothing is there to find"
    for dependent in (np.full(30, 4.0), tokens / 500):
        update_s, token_s, micro_batch_s = training_costs(tokens, dependent, 1 + 1e-3 * tokens + 0.2 * dependent)
        assert micro_batch_s == 0.0
        assert update_s + token_s * tokens.mean() == pytest.approx(1 + 1e-3 * tokens.mean() + 0.2 * dependent.mean())


def test_micro_batches_grow_as_long_as_their_own_time_is_worth_it_and_memory_is_enough(tmp_path: Path):
    words = {"lab__micro_batch_s": 1.5, "lab__train_us": 20_000, "optimizer__micro_tokens": 400}
    recipe = run_of(tmp_path / "run", **words)
    as_measured(tmp_path / "run", recipe)
    real = structs.replace(recipe, roles=structs.replace(recipe.roles, actor=3))
    assert profile_of(tmp_path / "run", real).micro_batch_s == pytest.approx(1.5, rel=0.1)
    simulation = Simulation.of(Devices.of(recipe), tmp_path / "plan")
    own = simulation.devices.own
    times = simulation.micro_batches(own, most=4.5)
    assert times == 4 and simulation.micro_batches(own, most=2.5) == 2
    few, many = simulation.figures(own, times), simulation.figures(own)
    assert few.micro_batches < many.micro_batches and few.tokens_per_s > 1.1 * many.tokens_per_s
    free = structs.replace(recipe, lab=recipe.lab | {"micro_batch_s": 0.0})
    assert Simulation.of(Devices.of(free), tmp_path / "free").micro_batches(own, most=16) == 1


@pytest.mark.parametrize("train_us", [20_000, 100_000])
def test_the_plan_is_the_best_split_of_all(tmp_path: Path, train_us: int):
    devices = Devices.of(recipe_of(tmp_path, lab__train_us=train_us, lab__stretch=32, run__steps=6))
    simulation = Simulation.of(devices, tmp_path / "plan")
    best = simulation.figures(simulation.best(budget=6)).tokens_per_s
    speeds = [
        simulation.figures(Knobs(rollouts, running)).tokens_per_s
        for rollouts in range(1, 4)
        for running in devices.ladders(devices.balanced)["max_running"]
        if running is not None
    ]
    assert best == pytest.approx(max(speeds), rel=0.03)


def test_equal_parts_keep_the_mean_and_the_tail_of_the_lengths():
    lengths = [round(length) for length in np.random.default_rng(0).lognormal(7, 1, 10_000)]
    parts = equal_parts(lengths)
    assert len(parts) == MOST_LENGTHS
    assert np.mean(parts) == pytest.approx(np.mean(lengths), rel=0.003)
    assert np.quantile(parts, 0.99) == pytest.approx(np.quantile(lengths, 0.99), rel=0.07)
    assert equal_parts([5, 3]) == (3, 5)


def test_no_term_of_a_line_is_negative_and_its_mean_is_kept():
    assert line_through([1, 2, 3], [3, 5, 7]) == pytest.approx((1, 2))
    assert line_through([1, 2, 3], [1, 3, 5]) == pytest.approx((0, 1.5))
    assert line_through([1, 2, 3], [5, 4, 3]) == pytest.approx((4, 0))
    assert line_through([2, 2], [3, 5]) == pytest.approx((4, 0))


def test_the_command_predicts_a_finished_run_and_proposes_a_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = run_of(tmp_path / "run", run__steps=8)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_yaml(recipe))
    assert main([str(path), f"run.dir={tmp_path / 'job'}", "--from", str(tmp_path / "run"), "--runs", "2"]) == 0
    out = capsys.readouterr().out
    assert "predicted over measured tokens/s: 1.000" in out
    assert "proposed for 6 GPUs: actor " in out and "settings: run.schedule=" in out and " lab.train_gpus=" in out
    assert all(f"\n  {name} " in out for name in SCHEDULES), "each schedule with the same split"
    settings = dict(word.split("=") for word in out.splitlines()[-1].removeprefix("settings: ").split())
    kept = msgspec.json.decode((tmp_path / "job-plan" / PREDICTION_FILE).read_bytes(), type=Prediction)
    assert {key: str(value) for key, value in kept.settings.items()}.items() <= settings.items()


def test_a_plan_says_when_its_runs_are_too_short_to_settle(tmp_path: Path):
    def lines(num_steps: int) -> str:
        recipe = recipe_of(tmp_path, lab__train_us=500, lab__p99_over_median=30, run__steps=num_steps)
        simulation = Simulation.of(Devices.of(recipe), tmp_path / "plan")
        return "\n".join(proposal(simulation, simulation.devices.own, None))

    assert "too few steps: with a staleness of " in lines(8)
    assert "too few steps" not in lines(40)


def test_a_plan_proposes_another_schedule_where_it_is_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = recipe_of(tmp_path / "job", run__schedule="sync", run__steps=8)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_yaml(recipe))
    assert main([str(path), "--runs", "2"]) == 0
    out = capsys.readouterr().out
    mine = next(line for line in out.splitlines() if line.endswith("  the recipe's"))
    assert mine.split()[0] == "sync"
    assert "settings: run.schedule=sync " not in out


def test_the_proposed_settings_undo_what_the_proposed_schedule_refuses(tmp_path: Path):
    recipe = recipe_of(tmp_path, queue__max_staleness=2, queue__lead=9, run__steps=8)
    simulation = Simulation.of(Devices.of(recipe), tmp_path / "plan").with_schedule("one_step")
    (tmp_path / "plan").mkdir(exist_ok=True)
    *_, line = proposal(simulation, simulation.devices.own, None, tmp_path / "plan", recipe)
    assert line.endswith(" queue.max_staleness=null queue.lead=auto")
    kept = msgspec.json.decode((tmp_path / "plan" / PREDICTION_FILE).read_bytes(), type=Prediction)
    assert kept.settings.items() >= {"queue.max_staleness": None, "queue.lead": "auto"}.items()
    words = line.removeprefix("settings: ").split()
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_yaml(recipe))
    check_settings(read_recipe(path, words))
    assert job_digest(read_recipe(path, words), kept.settings) == kept.job


@pytest.mark.parametrize(("tp", "kv_gb_s"), [(1, 50.0), (2, None)])
def test_replicas_of_several_gpus_send_no_caches_in_a_plan(tmp_path: Path, tp: int, kv_gb_s: float | None):
    recipe = run_of(tmp_path, run__steps=8)
    as_measured(tmp_path, recipe)
    found = profile_of(tmp_path, structs.replace(recipe, rollout=structs.replace(recipe.rollout, tp=tp)))
    assert (found.kv_gb_s, found.broadcast_gb_s) == (kv_gb_s, None)


@pytest.mark.parametrize(("gpus_per_rollout", "seconds"), [(1, "1.58"), (2, "1.32")])
def test_each_gpu_of_a_rollout_pulls_its_own_share_of_a_version(tmp_path: Path, gpus_per_rollout: int, seconds: str):
    """13 GB: pushed at 14.43 GB/s, forwarded at 80, pulled at 25 by each GPU."""
    settings = {"lab.gpus_per_rollout": gpus_per_rollout, "lab.push_gb_s": 14.43, "run.steps": 6}
    simulation = Simulation.of(Devices.of(recipe_of(tmp_path, **settings)), tmp_path / "plan")
    (line,) = (text for text in proposal(simulation, simulation.best(budget=1), None) if text.startswith("weights:"))
    assert f"have a version {seconds} s after" in line


def test_mistakes_of_a_plan_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = recipe_of(tmp_path / "job")
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_yaml(recipe))
    real = tmp_path / "real.yaml"
    real.write_text(recipe_yaml(Recipe()))
    untraced = tmp_path / "untraced"
    save_recipe(structs.replace(Recipe(), run=structs.replace(Recipe().run, dir=str(untraced))))
    for words, message in (
        ([str(path), "--from", str(tmp_path / "none")], "--from: "),
        ([str(real), "--from", str(untraced)], "has no trace of a trainer and a rollout"),
        ([str(path), "--gpus", "1"], "--gpus: 1 are too few"),
        ([str(path), "--steps", "5"], "--steps (or run.steps): at least 6"),
        ([str(path), "lab.colocated=true", "run.schedule=sync"], "lab.colocated: "),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
