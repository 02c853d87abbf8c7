"""Runs in virtual time: the real hub and loops on one heap of events, without processes or sleeps."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from support.emulated_run import EMULATED

from headrace.comm.recipe import Recipe
from headrace.launch.config.load import read_recipe
from headrace.launch.lab.emulated.device import EmulatedDevice, EmulatedSequence, response_length
from headrace.launch.lab.emulated.transfer import EmulatedTransfer
from headrace.launch.lab.figures import figures_of, window_of
from headrace.launch.lab.settings import lab_of
from headrace.launch.lab.virtual.network import MESSAGE_S
from headrace.launch.lab.virtual.run import VirtualRun
from headrace.launch.lab.virtual.world import OwnClock, World, WorldClock
from headrace.launch.report.timeline import Timeline
from headrace.relay.journal.events import Leased, Moved, Received
from headrace.relay.journal.files import read_events
from headrace.relay.journal.replay import replay
from headrace.relay.queue.schedules import SCHEDULES


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
    reasons = set(run.hub.state.midway)
    assert bool(mixed) == bool(reasons), "versions change within a trajectory only by the hub's count"
    assert (
        reasons == {"age"} if schedule == "partial" else reasons <= ({"starved"} if schedule == "headrace" else set())
    )


def test_weights_that_are_too_far_behind_are_replaced_under_running_trajectories(tmp_path: Path):
    words = {"lab__p99_over_median": 30, "lab__update_s": 2, "repack__period_s": 0}
    longest: dict[str, int] = {}
    for max_age in ("never", "2"):
        run = run_of(tmp_path / max_age, roles__rollout=4, run__steps=16, rollout__max_age=max_age, **words)
        assert replay(tmp_path / max_age / "journal.jsonl") == run.hub.state and run.hub.state.is_balanced
        events = [event for _, event in read_events(tmp_path / max_age / "journal.jsonl")]
        versions: dict[str, list[int]] = {}
        for event in events:
            if isinstance(event, Received):
                versions.setdefault(event.holder, []).append(event.version)
        longest[max_age] = max(new - old for each in versions.values() for old, new in pairwise(each))
        assert (max(run.hub.state.versions_per_trajectory) > 1) == (max_age != "never")
    assert longest["2"] == 3 < longest["never"]


def test_a_rollout_for_which_the_trainer_starves_takes_new_weights_midway_and_the_trainer_waits_less(tmp_path: Path):
    seconds: dict[str, float] = {}
    for max_age in ("never", "null"):
        words = {"lab__p99_over_median": 10, "batch__prompts_per_step": 8, "generator__max_running": 64}
        run = run_of(tmp_path / max_age, roles__rollout=1, run__steps=12, rollout__max_age=max_age, **words)
        state = run.hub.state
        assert replay(tmp_path / max_age / "journal.jsonl") == state and state.is_balanced
        received = [
            event for _, event in read_events(tmp_path / max_age / "journal.jsonl") if isinstance(event, Received)
        ]
        num_ordered = sum(event.is_ordered for event in received)
        assert state.midway["starved"] == num_ordered and (num_ordered > 0) == (max_age == "null")
        assert (max(state.versions_per_trajectory) > 1) == (max_age == "null")
        lines = (tmp_path / max_age / "metrics.jsonl").read_text().splitlines()
        assert sum(json.loads(line).get("weights/midway", 0) for line in lines) <= num_ordered
        seconds[max_age] = json.loads(lines[-1])["time_s"]
    assert seconds["null"] < seconds["never"]


def test_a_run_depends_on_its_recipe_alone(tmp_path: Path):
    journals = {}
    for name in ("one", "two"):
        run_of(tmp_path / name, run__schedule="headrace", roles__rollout=4)
        journals[name] = (tmp_path / name / "journal.jsonl").read_bytes()
    assert journals["one"] == journals["two"]


def test_a_step_of_one_rollout_takes_the_time_of_its_device_of_the_trainer_and_of_four_messages(tmp_path: Path):
    run = run_of(tmp_path, run__schedule="sync", roles__rollout=1, run__steps=7)
    settings = lab_of(run.recipe.lab)
    timeline = Timeline.read(tmp_path)
    figures = figures_of(tmp_path, timeline, window_of(timeline, 7))
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
        transfer = EmulatedTransfer(settings, "sync")
        trained_s = num_tokens * settings.train_us * 1e-6 / settings.train_gpus
        expected.append(device.seconds + trained_s + transfer.chain_s + transfer.pull_s + 4 * MESSAGE_S)
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


def test_rollouts_take_more_than_their_part_of_a_step_where_trajectories_last_for_several_steps(tmp_path: Path):
    taken: dict[str, int] = {}
    for length, median, train_us in (("long", 600, 100), ("short", 60, 100_000)):
        words = {"lab__median_tokens": median, "lab__train_us": train_us, "run__steps": 10}
        run_of(tmp_path / length, roles__rollout=4, **words)
        events = [event for _, event in read_events(tmp_path / length / "journal.jsonl")]
        leased = [(event.holder, event.request_id) for event in events if isinstance(event, Leased)]
        leases = Counter(leased[20:])  # before the first of the ten steps has ended the window is two steps
        taken[length] = max(leases.values())
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


@pytest.mark.parametrize("schedule", ["sync", "partial", "headrace"])
def test_a_run_with_tools_trains_each_row_once_and_takes_their_time(tmp_path: Path, schedule: str):
    step_s: dict[float, float] = {}
    for tool_s in (0.0, 20.0):
        words = {"lab__turns": 3, "lab__tool_s": tool_s, "run__schedule": schedule}
        run = run_of(tmp_path / f"{tool_s:g}", **words)
        assert run.hub.state.account.trained == 6 * 16 and run.hub.state.is_balanced
        step_s[tool_s] = run.world.now / 6
    assert step_s[20.0] > step_s[0.0] + 20, "two tools of 20 s one after the other"


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
