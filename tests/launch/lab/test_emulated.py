"""Emulated devices: their arithmetic, and a whole run on them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from support.emulated_run import FAST
from support.system import System

from headrace.comm.errors import SettingError
from headrace.launch.config.checks.recipe import check_settings
from headrace.launch.config.load import read_recipe
from headrace.launch.lab.emulated.device import EmulatedDevice, EmulatedSequence, response_length, tool_seconds
from headrace.launch.lab.emulated.transfer import EmulatedTransfer
from headrace.launch.lab.settings import lab_of
from headrace.relay.queue.schedules import SCHEDULES

SETTINGS = lab_of({"profile": "papers"})
LONGEST = 16384


def sequences(count: int, limit: int, num_prompt: int = 100) -> list[EmulatedSequence]:
    return [EmulatedSequence(number << 12, num_prompt, limit) for number in range(count)]


def finish_all(device: EmulatedDevice, num_steps: int = 32) -> list[EmulatedSequence]:
    done: list[EmulatedSequence] = []
    while device.running or device.waiting or device.paused:
        done += device.advance(num_steps)
    return done


@pytest.mark.parametrize(("batch", "milliseconds"), [(8, 11), (64, 18)])
def test_the_curve_goes_through_the_published_points(batch: int, milliseconds: float):
    """Laminar, figure 4: 32B, TP4, 4096 tokens each."""
    seconds = EmulatedDevice(SETTINGS, 512).steps_s(batch, batch * 4096, 1)
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.02)


@pytest.mark.parametrize("host_ms", [0.0, 12.9, 1000.0])
def test_a_stretch_takes_the_sum_of_its_steps(host_ms: float):
    device = EmulatedDevice(structs.replace(SETTINGS, host_ms=host_ms), 512)
    steps = sum(device.steps_s(300, 1000 + 300 * i, 1) for i in range(50))
    assert device.steps_s(300, 1000, 50) == pytest.approx(steps)


def test_a_host_that_launches_each_kernel_hides_behind_slower_gpus():
    device = EmulatedDevice(structs.replace(SETTINGS, host_ms=16.8, step_ms=1.0), 512)
    assert device.steps_s(8, 8 * 1000, 1) == pytest.approx(17.8e-3)
    full = 1e-3 + 9.9e-3 + 500_000 * 30.5e-9
    assert device.steps_s(200, 500_000, 1) == pytest.approx(full)


def test_the_length_of_a_stretch_does_not_change_the_devices_time():
    def seconds(num_steps: int) -> float:
        device = EmulatedDevice(SETTINGS, 16)
        device.add(EmulatedSequence(n << 12, 50, 20 + 7 * n) for n in range(40))
        assert len(finish_all(device, num_steps)) == 40 and device.load == 0
        return device.seconds

    assert seconds(1) == pytest.approx(seconds(32)) == pytest.approx(seconds(10**6))


def test_a_full_cache_preempts_the_newest_and_loses_no_trajectory():
    settings = structs.replace(SETTINGS, kv_tokens=5000)
    device = EmulatedDevice(settings, 512)
    device.add(sequences(60, limit=400))
    done = finish_all(device)
    assert len(done) == 60 and all(s.num_new == 400 for s in done)
    assert device.num_preempted > 0 and device.num_recomputed > 0 and device.load == 0
    assert [s.trajectory_id >> 12 for s in done][:5] == [0, 1, 2, 3, 4], "the oldest advance"


def test_weights_that_change_midway_cost_a_prefill_of_all_running_trajectories():
    device = EmulatedDevice(SETTINGS, 512)
    device.add([EmulatedSequence(sample, 100, 1000) for sample in range(4)])
    device.advance(10)
    before = device.seconds
    device.recompute()
    assert (len(device.waiting), device.load) == (4, 0)
    device.advance(1)
    tokens = 100 + 4 * 10  # the group's prompt once
    assert device.num_recomputed == tokens
    assert device.seconds - before == pytest.approx(tokens * SETTINGS.prefill_us * 1e-6 + device.steps_s(4, 4 * 110, 1))


def test_weights_that_change_make_keys_and_values_that_were_sent_worthless():
    device = EmulatedDevice(SETTINGS, 512)
    device.receive(EmulatedSequence(1, 4000, 9000, num_new=500))
    device.recompute()
    (sent,) = device.waiting
    assert (sent.num_missing, sent.arrives_at, device.num_recomputed) == (4500, 0, 4500)
    device.advance(1)
    assert device.seconds == pytest.approx(4500 * SETTINGS.prefill_us * 1e-6 + device.steps_s(1, 4500, 1))


def test_keys_and_values_that_are_sent_arrive_beside_decoding_one_sequence_after_another():
    device = EmulatedDevice(SETTINGS, 512)
    device.add([EmulatedSequence(0, 100, 1000)])
    device.advance(10)
    began = device.seconds
    moved = [EmulatedSequence(number, 100, 9000, num_new=5000) for number in (1, 2)]
    for sequence in moved:
        device.receive(sequence)
    one_s = 5100 * SETTINGS.kv_token_bytes / 50e9
    assert [sequence.arrives_at - began for sequence in moved] == pytest.approx([one_s, 2 * one_s])
    device.advance(1)
    assert (len(device.running), device.seconds - began) == (1, pytest.approx(device.steps_s(1, 110, 1)))
    before = device.seconds
    while len(device.running) < 3:
        before = device.seconds
        device.advance(1)
    assert before >= moved[1].arrives_at > before - device.steps_s(3, 20_000, 1)


def test_a_device_without_other_work_waits_for_keys_and_values():
    device = EmulatedDevice(SETTINGS, 512)
    sequence = EmulatedSequence(1, 100, 9000, num_new=5000)
    device.receive(sequence)
    device.advance(1)
    assert device.seconds == pytest.approx(sequence.arrives_at + device.steps_s(1, 5100, 1))


TOOLS = structs.replace(SETTINGS, turns=4, tool_s=30.0)


def test_a_trajectory_waits_for_its_tools_with_its_cache_and_without_decoding():
    device = EmulatedDevice(TOOLS, 512, seed=3)
    device.add([EmulatedSequence(7, 100, 1000)])
    done = finish_all(device)
    assert [sequence.num_new for sequence in done] == [1000]
    tools_s = sum(tool_seconds(3, 7, num, TOOLS) for num in (250, 500, 750))
    decoded_s = device.steps_s(1, 100, 1000)
    assert device.seconds == pytest.approx(tools_s + decoded_s) and tools_s > decoded_s
    assert (device.load, device.num_recomputed) == (0, 0)


def test_others_decode_while_a_trajectory_waits_for_its_tool_even_in_its_place_in_the_batch():
    device = EmulatedDevice(TOOLS, max_running=1, seed=3)
    device.add([EmulatedSequence(7, 100, 1000), EmulatedSequence(8, 100, 200)])
    device.advance(251)
    assert (list(device.paused), list(device.running)) == ([7], [8])
    assert device.load == 100 + 250 + 100 + 1
    finish_all(device)


def answered_device() -> EmulatedDevice:
    """A device on which trajectory 7 has its answer after 250 tokens, and 8 runs in its place."""
    device = EmulatedDevice(structs.replace(TOOLS, tool_s=0.0, kv_tokens=1000), max_running=1)
    device.add([EmulatedSequence(7, 100, 1000), EmulatedSequence(8, 100, 2000)])
    device.advance(251)
    assert (list(device.running), [sequence.trajectory_id for sequence in device.waiting]) == ([8], [7])
    return device


def test_a_trajectory_keeps_its_cache_until_it_has_its_place_after_the_answer():
    device = answered_device()
    assert device.load == 350 + 101
    assert device.remove(8) is not None and device.load == 350
    device.advance(1)
    assert (list(device.running), device.load, device.num_recomputed) == ([7], 351, 0)


def test_a_trajectory_that_is_taken_away_after_its_answer_leaves_the_cache():
    device = answered_device()
    assert device.remove(7) is not None and device.load == 101


def test_new_weights_and_a_full_cache_drop_what_waits_for_its_place_after_an_answer():
    device = answered_device()
    device.recompute()
    assert (device.load, device.num_recomputed) == (0, 350 + 101)
    device = answered_device()
    device.advance(2000)
    assert finish_all(device) is not None and (device.load, device.num_recomputed > 0) == (0, True)


def test_weights_that_change_make_the_caches_of_those_that_wait_for_tools_worthless():
    device = EmulatedDevice(TOOLS, 512)
    device.add([EmulatedSequence(7, 100, 1000)])
    device.advance(250)
    assert list(device.paused) == [7]
    device.recompute()
    assert (device.load, device.num_recomputed) == (0, 350)
    before = device.seconds
    finish_all(device)
    assert device.seconds - before > 350 * SETTINGS.prefill_us * 1e-6 + device.steps_s(1, 350, 750)
    assert device.load == 0


def test_a_full_cache_takes_the_room_of_those_that_wait_for_tools_first():
    device = EmulatedDevice(structs.replace(TOOLS, kv_tokens=1000, tool_s=1e6), 512)
    device.add([EmulatedSequence(7, 100, 1200), EmulatedSequence(8, 100, 600)])
    device.advance(300)
    assert list(device.paused) == [8, 7] and device.load == 100 + 150 + 100 + 300
    device.add([EmulatedSequence(9, 600, 100)])
    device.advance(1)
    assert list(device.running) == [9] and device.paused[7].num_missing == 400 and device.num_preempted == 0
    assert device.load == 601 + 250


def test_lengths_have_a_long_tail_and_depend_on_seed_and_trajectory_alone():
    lengths = [response_length(0, number, SETTINGS, 10**9) for number in range(20_000)]
    median, p99 = np.percentile(lengths, [50, 99])
    assert median == pytest.approx(SETTINGS.median_tokens, rel=0.03)
    assert p99 / median == pytest.approx(10, rel=0.1)
    assert response_length(0, 5, SETTINGS, LONGEST) == lengths[5] != response_length(1, 5, SETTINGS, LONGEST)
    assert max(response_length(0, number, SETTINGS, LONGEST) for number in range(5000)) == LONGEST


def test_where_all_update_together_the_broadcast_stalls_trainer_and_rollouts():
    by_relay, together = (EmulatedTransfer(SETTINGS, schedule) for schedule in ("headrace", "one_step"))
    assert together.push_s == together.pull_s == pytest.approx(65 / 54)
    assert by_relay.push_s == pytest.approx(0.65) and by_relay.pull_s == pytest.approx(0.65)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_of_this_program_publishes_through_relays(schedule: str):
    program = lab_of({})
    transfer, relays = (EmulatedTransfer(program, name) for name in (schedule, "headrace"))
    assert vars(transfer) == vars(relays)
    assert (transfer.chain_s, transfer.pull_s) == (pytest.approx(65 / 3), pytest.approx(65 / 4 / 8.7))
    assert EmulatedTransfer(structs.replace(program, colocated=True), "sync").pull_s == pytest.approx(65 / 32)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollout.engine=emulated"], "both or neither"),
        (["rollout.engine=emulated", "trainer.engine=emulated", "roles.actor=2"], "lab.train_gpus"),
        (["rollout.engine=emulated", "trainer.engine=emulated", "batch.passes=2"], "train each group once"),
        (["rollout.engine=emulated", "trainer.engine=emulated", "lab.colocated=true"], "run.schedule=sync"),
    ],
)
def test_devices_that_are_half_emulated_are_refused(words: list[str], message: str):
    with pytest.raises(SettingError, match=message):
        check_settings(read_recipe(None, words))


def test_an_emulated_rollout_loads_no_library_of_models():
    code = (
        "import sys, headrace.rollout.loop, headrace.launch.lab.emulated.generator, headrace.trainer.loop, headrace.launch.lab.emulated.learner;"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("schedule", ["headrace", "partial", "one_step"])
def test_emulated_devices_run_in_the_real_system_on_the_same_lengths(tmp_path: Path, schedule: str):
    system = System(tmp_path, **FAST, **{"run.schedule": schedule}).start_all(num_rollouts=2)
    summary = system.wait()
    assert summary["accounting"]["trained"] == 3 * 16 and summary["accounting"]["holds"]
    rows = [json.loads(line) for line in (system.dir / "metrics.jsonl").read_text().splitlines()]
    if schedule == "one_step":
        lengths = [
            response_length(0, n, structs.replace(SETTINGS, median_tokens=200), 2000) for n in group_numbers(system)
        ]
        assert rows[0]["response_length/mean"] == pytest.approx(np.mean(lengths))
    assert all(row["timing_s/step"] > row["timing_s/update_actor"] > 0 for row in rows)
    lines = [json.loads(line) for line in (system.dir / "trace" / "rollout-0.jsonl").read_text().splitlines()]
    assert {"generate", "pull"} <= {line.get("state") for line in lines}


def group_numbers(system: System) -> list[int]:
    """The numbers of the trajectories of the first step's batch."""
    from headrace.relay.journal.events import Handed
    from headrace.relay.journal.files import read_events

    handed = [e for _, e in read_events(system.dir / "journal.jsonl") if isinstance(e, Handed) and e.step == 0]
    groups = [group for event in handed for group in event.groups]
    return [group.row(sample).number for group in groups for sample in range(4)]
