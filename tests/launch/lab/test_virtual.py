"""Runs in virtual time: the real hub and loops on one heap of events, without processes or sleeps."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from support.emulated_run import EMULATED

from headrace.comm.recipe import Recipe
from headrace.launch.config.load import read_recipe
from headrace.launch.lab import compare
from headrace.launch.lab.emulated.device import EmulatedDevice, EmulatedSequence, response_length
from headrace.launch.lab.experiment import Result
from headrace.launch.lab.figures import figures_of, window_of
from headrace.launch.lab.paired_latency import PairedLatency, paired_table
from headrace.launch.lab.settings import LabSettings, lab_of
from headrace.launch.lab.tuning import read_tuned
from headrace.launch.lab.virtual.network import MESSAGE_S
from headrace.launch.lab.virtual.run import VirtualRun
from headrace.launch.lab.virtual.world import OwnClock, World, WorldClock
from headrace.launch.report.timeline import Timeline
from headrace.relay.journal.events import Leased, Moved, Received
from headrace.relay.journal.journal import read_events, replay
from headrace.relay.queue.schedules import SCHEDULES

RECIPE = Path(compare.__file__).parent / "recipes" / "emulated-16.yaml"


def recipe_of(folder: Path, **settings: object) -> Recipe:
    """A short run; keys have `__` for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.jsonl").write_text('{"prompt": "p"}\n' * 64)
    named = {key.replace("__", "."): value for key, value in settings.items()}
    all_settings = EMULATED | {"run.steps": 6, "run.dir": folder, "data.path": folder / "prompts.jsonl"} | named
    return read_recipe(None, [f"{key}={value}" for key, value in all_settings.items()])


def run_of(folder: Path, **settings: object) -> VirtualRun:
    run = VirtualRun(recipe_of(folder, **settings))
    run.run()
    return run


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_each_row_once_at_its_staleness(tmp_path: Path, schedule: str):
    run = run_of(tmp_path, run__schedule=schedule)
    assert replay(tmp_path / "journal.jsonl") == run.hub.state
    assert run.hub.state.account.trained == 6 * 16 and run.hub.state.is_balanced
    if schedule not in ("partial", "headrace"):
        assert max(run.hub.state.staleness) == (schedule not in ("sync", "stream_sync"))
    mixed = [n for n in run.hub.state.versions_per_trajectory if n > 1]
    assert bool(mixed) == (schedule == "partial"), "versions change within a trajectory"


def test_weights_that_are_too_far_behind_are_replaced_under_running_trajectories(tmp_path: Path):
    words = {"lab__p99_over_median": 30, "lab__update_s": 2, "repack__enabled": "false"}
    longest: dict[str, int] = {}
    for max_age in ("null", "2"):
        run = run_of(tmp_path / max_age, roles__rollout=4, run__steps=16, rollout__max_age=max_age, **words)
        assert replay(tmp_path / max_age / "journal.jsonl") == run.hub.state and run.hub.state.is_balanced
        events = [event for _, event in read_events(tmp_path / max_age / "journal.jsonl")]
        versions: dict[str, list[int]] = {}
        for event in events:
            if isinstance(event, Received):
                versions.setdefault(event.holder, []).append(event.version)
        longest[max_age] = max(new - old for each in versions.values() for old, new in pairwise(each))
        assert (max(run.hub.state.versions_per_trajectory) > 1) == (max_age != "null")
    assert longest["2"] == 3 < longest["null"]


def test_a_run_depends_on_its_recipe_alone(tmp_path: Path):
    journals = {}
    for name in ("one", "two"):
        run_of(tmp_path / name, run__schedule="headrace", roles__rollout=4)
        journals[name] = (tmp_path / name / "journal.jsonl").read_bytes()
    assert journals["one"] == journals["two"]


def test_a_step_of_one_rollout_takes_the_time_of_its_device_of_the_trainer_and_of_four_messages(tmp_path: Path):
    run = run_of(tmp_path, run__schedule="sync", roles__rollout=1, run__steps=7)
    settings = lab_of(run.recipe)
    timeline = Timeline.read(tmp_path)
    figures = figures_of(tmp_path, timeline, window_of(timeline, 7), settings.prefill_us * 1e-6)
    events = [event for _, event in read_events(tmp_path / "journal.jsonl")]
    groups = [event.group for event in events if isinstance(event, Leased)]
    expected = []
    for first in (12, 16):  # the groups of the fourth and the fifth step
        device, num_tokens = EmulatedDevice(settings, 256), 0
        for rows in ([group.row(sample) for sample in range(4)] for group in groups[first : first + 4]):
            lengths = [response_length(0, row.number, settings, 2000) for row in rows]
            new = [EmulatedSequence(row.number, 300, length) for row, length in zip(rows, lengths, strict=True)]
            new[0].num_missing = 300
            device.add(new)
            num_tokens += sum(lengths) + 300 * len(lengths)
        while device.running or device.waiting:
            device.advance(settings.stretch)
        broadcast_s = settings.weights_gb / settings.broadcast_gb_s
        trained_s = num_tokens * settings.train_us * 1e-6 / settings.train_gpus
        expected.append(device.seconds + trained_s + broadcast_s + 4 * MESSAGE_S)
    assert figures.step_s == pytest.approx(sum(expected) / 2, abs=0.002)


def test_the_seconds_in_which_the_trainer_starved_are_emulated_like_those_in_which_it_waited(tmp_path: Path):
    run_of(tmp_path, lab__train_us=1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    waited = [line["timing_s/wait_data"] for line in lines]
    starved = [line["queue/starved_s"] for line in lines[1:]]
    assert starved[1:] == pytest.approx(waited[1:-1], rel=0.1), "each line has those of the step before"


def test_each_update_of_a_version_costs_its_time_once(tmp_path: Path):
    step_s: dict[tuple[float, int], float] = {}
    for seconds, updates in ((0, 1), (5, 1), (5, 4)):
        words = {"lab__update_s": seconds, "batch__updates_per_version": updates}
        folder = tmp_path / f"{seconds}-{updates}"
        run_of(folder, run__schedule="sync", roles__rollout=1, **words)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        step_s[seconds, updates] = sum(line["timing_s/update_actor"] for line in lines) / len(lines)
    assert step_s[5, 1] - step_s[0, 1] == pytest.approx(5)
    assert step_s[5, 4] - step_s[0, 1] == pytest.approx(20)


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
        run_of(folder, run__schedule="sync", run__steps=7, **device)
        timeline = Timeline.read(folder)
        results.append(Result(str(folder), 2, 32, figures_of(folder, timeline, window_of(timeline, 7), 0.0)))
    pairs = PairedLatency.of(tmp_path / "slower", tmp_path / "one")
    assert pairs.num == 2 * 16, "two steps are measured"
    assert pairs[1:] == pytest.approx([2] * 4, rel=0.05)
    ratios = paired_table(*results).splitlines()[-1]
    assert ratios.startswith("| ratio | 2 + 32 | 0.5")
    assert ratios.endswith(f"| {pairs.mean:.3f} | {pairs.p50:.3f} | {pairs.p99:.3f} | {pairs.longest:.3f} | 32 |")


def test_rollouts_take_more_than_their_part_of_a_step_where_trajectories_last_for_several_steps(tmp_path: Path):
    taken: dict[str, int] = {}
    for length, median, train_us in (("long", 600, 100), ("short", 60, 100_000)):
        words = {"lab__median_tokens": median, "lab__train_us": train_us, "run__steps": 10}
        run_of(tmp_path / length, roles__rollout=4, **words)
        events = [event for _, event in read_events(tmp_path / length / "journal.jsonl")]
        leases = Counter((event.holder, event.request_id) for event in events if isinstance(event, Leased))
        taken[length] = max(leases.values())
        timeline = Timeline.read(tmp_path / length)
        figures = figures_of(tmp_path / length, timeline, window_of(timeline, 10), 0.0)
        assert figures.is_settled == (length == "short"), "of 10 steps, 4 and 2 do not count"
    assert taken["long"] > 1 and taken["short"] == 1, "a part of a step is one group"


def test_long_trajectories_move_to_another_rollout(tmp_path: Path):
    tails = {
        "lab__p99_over_median": 30,
        "repack__period_s": 1,
        "lab__batch_bound": 64,
    }
    run_of(tmp_path, roles__rollout=4, batch__prompts_per_step=16, **tails)
    moved = [event for _, event in read_events(tmp_path / "journal.jsonl") if isinstance(event, Moved)]
    assert any(event.source != event.holder for event in moved)


def test_a_process_that_is_ahead_sends_its_messages_when_its_work_is_done():
    world = World()
    clock, order = OwnClock(world), []
    world.at(1.0, lambda: order.append("soon"))
    clock.sleep_until(5.0)
    assert (clock.now(), world.now) == (5.0, 0.0), "its time passed, the world's did not"
    world.at(clock.now(), lambda: order.append("when done"))
    WorldClock(world).sleep_until(4.0)
    assert (order, world.now) == (["soon"], 4.0)
    world.run_until(lambda: len(order) == 2)
    assert world.now == 5.0


def test_a_run_without_anything_left_to_happen_is_an_error():
    with pytest.raises(AssertionError, match="the run stands still"):
        World().run_until(lambda: False)


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


@pytest.mark.parametrize(("model", "billions", "layers", "kv_heads"), [("7b", 7.6, 28, 4), ("72b", 72.7, 80, 8)])
def test_the_devices_of_other_models_follow_from_the_shares_of_the_hardware_that_32b_uses(
    model: str, billions: float, layers: int, kv_heads: int
):
    base, other = LabSettings(), lab_of(read_recipe(RECIPE.with_name(f"emulated-{model}.yaml"), []))
    larger, gpus = billions / 32.5, other.gpus_per_rollout / base.gpus_per_rollout
    bytes_ratio = layers * kv_heads / (64 * 8)
    activations_gb = (
        0.85 * 80 * base.gpus_per_rollout - base.weights_gb - base.kv_tokens * base.kv_token_bytes / 1e9
    ) * gpus
    expected = {
        "weights_gb": base.weights_gb * larger,
        "weights_ms": base.weights_ms * larger / gpus,
        "request_us": base.request_us * larger / gpus,
        "prefill_us": base.prefill_us * larger / gpus,
        "kv_token_bytes": base.kv_token_bytes * bytes_ratio,
        "kv_ns": base.kv_ns * bytes_ratio / gpus,
        "kv_tokens": (0.85 * 80 * other.gpus_per_rollout - other.weights_gb - activations_gb) * 1e9 / other.kv_token_bytes,
        "train_us": base.train_us * larger,
    }  # fmt: skip
    assert {name: getattr(other, name) for name in expected} == pytest.approx(expected, rel=0.01)


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
    chosen = read_tuned(str(recipe))["16-16groups"]["partial"]
    out = capsys.readouterr().out
    assert f"| {str(chosen) or '-'} |" in out and " to " in out.splitlines()[-1]
