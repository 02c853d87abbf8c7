"""The fleet's figures are differences between reports, so that each step sees its own interval."""

from headrace.comm.messages import GroupId, LoadReport
from headrace.relay.hub.telemetry import FleetStats
from headrace.relay.journal import events as ev
from headrace.relay.journal.state import HubState, apply


def load(tokens: int, busy_s: float, idle_s: float, kv_util: float = 0.5) -> LoadReport:
    return LoadReport(
        version=1,
        num_running=4,
        num_waiting=0,
        kv_util=kv_util,
        tokens=tokens,
        busy_s=busy_s,
        idle_s=idle_s,
        pull_s=0.25,
    )


def test_rates_are_over_the_interval_since_the_last_step():
    telemetry, state = FleetStats(), HubState()
    telemetry.add("rollout-0", load(100, 1.0, 1.0))
    telemetry.snapshot(state)
    telemetry.finish_step()
    telemetry.add("rollout-0", load(400, 4.0, 2.0))
    metrics = telemetry.snapshot(state)
    assert metrics["idle/rollout"] == 0.25
    assert metrics["rollout/tok_per_s"] == 75.0
    assert (metrics["rollout/kv_util"], metrics["weights/pull_s"]) == (0.5, 0.25)


def test_rollouts_add_up_and_one_that_is_gone_is_forgotten():
    telemetry, state = FleetStats(), HubState()
    for name in ("rollout-0", "rollout-1"):
        telemetry.add(name, load(0, 0.0, 0.0))
    telemetry.snapshot(state)
    telemetry.finish_step()
    for name in ("rollout-0", "rollout-1"):
        telemetry.add(name, load(50, 1.0, 0.0))
    assert telemetry.snapshot(state)["rollout/tok_per_s"] == 100.0
    telemetry.finish_step()
    telemetry.forget("rollout-1")
    telemetry.add("rollout-0", load(100, 2.0, 0.0))
    assert telemetry.snapshot(state)["rollout/tok_per_s"] == 50.0


def test_the_counters_of_a_process_that_was_started_again_count_from_zero():
    """Its first report may arrive before its death is noticed, or a report of the dead one after."""
    telemetry, state = FleetStats(), HubState()
    for report in (load(500, 60.0, 40.0), load(0, 0.5, 0.5), load(60, 3.5, 1.5)):
        telemetry.add("rollout-0", report)
    metrics = telemetry.snapshot(state)
    assert (metrics["idle/rollout"], metrics["rollout/tok_per_s"]) == (0.25, 15.0)


def test_a_role_without_reports_is_left_out():
    assert "idle/relay" not in FleetStats().snapshot(HubState())


def test_the_queue_is_seen_as_it_stands():
    state = HubState()
    apply(ev.Opened(epoch=1, samples_per_prompt=1), state)
    apply(ev.Leased(group=GroupId(0, 0), samples=[0], attempt=1, version=0, holder="r"), state)
    metrics = FleetStats().snapshot(state)
    assert (metrics["queue/leased_groups"], metrics["queue/ready_groups"]) == (1.0, 0.0)


def test_what_was_not_told_in_a_step_belongs_to_the_next():
    telemetry, state = FleetStats(), HubState()
    telemetry.add("rollout-0", load(0, 0.0, 0.0))
    telemetry.count("repack/count")
    telemetry.add("rollout-0", load(10, 1.0, 0.0))
    assert telemetry.snapshot(state)["repack/count"] == 1
    telemetry.count("repack/count")
    telemetry.add("rollout-0", load(30, 2.0, 0.0))
    told = telemetry.snapshot(state)
    assert (told["repack/count"], told["rollout/tok_per_s"]) == (2, 15.0)
    telemetry.count("repack/count", 5)
    telemetry.add("rollout-0", load(130, 3.0, 0.0))
    telemetry.finish_step()
    told = telemetry.snapshot(state)
    assert (told["repack/count"], told["rollout/tok_per_s"]) == (5, 100.0)
    telemetry.finish_step()
    assert "repack/count" not in telemetry.snapshot(state)
