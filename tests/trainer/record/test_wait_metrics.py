"""The trainer's waits are shown by role: no name of a metric has a host or a port."""

import pytest

from headrace.comm.waits import waiting
from headrace.trainer.record.wait_metrics import OTHER, WaitMeter, role_of_wait


@pytest.mark.parametrize(
    ("whom", "role"),
    [
        ("hub", "hub"), ("store localhost:46845", "store"), ("unit 10.0.0.7:41234", "relay"), ("unit relay-1#2", "relay"),
        ("storage units", "relay"), ("relay", "relay"), ("relay-12", "relay"), ("actor 0", "actor"), ("the disk", "disk"),
        ("the other actor ranks", "actor"), ("memory", "memory"), ("end 1 of link weights/0", "partner"),
        ("other hosts", "partner"), ("rollout-0, rollout-1", OTHER), ("hubris", OTHER), ("[::1]:80", OTHER),
    ],
)  # fmt: skip
def test_the_other_side_of_a_wait_is_shown_as_its_role(whom: str, role: str):
    assert role_of_wait(whom) == role


def test_the_waits_of_a_step_are_summed_over_the_peers_of_a_role():
    with waiting("unit 127.0.0.1:1", "its address", 60) as wait:
        wait.until(lambda: wait.elapsed_s > 0.2)
    meter = WaitMeter()  # the waits before are of no step
    for whom in ("unit 127.0.0.1:1", "unit 127.0.0.1:2"):
        with waiting(whom, "columns", 60) as wait:
            wait.until(lambda wait=wait: wait.elapsed_s > 0.02)
    with waiting("store here:3", "Get", 60) as wait:
        wait.until(lambda: wait.elapsed_s > 0.01)
        found = meter.step()  # the wait under way counts so far
    assert 0.04 < found["wait_s/relay"] < 0.2 and found["wait_s/store"] > 0.01
    again = meter.step()
    assert again["wait_s/relay"] == 0 and again["wait_s/store"] < found["wait_s/store"]
