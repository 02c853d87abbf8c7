"""The fleet's figures are differences between reports, so that each step sees its own interval."""

from msgspec import structs

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
    stats, state = FleetStats(), HubState()
    stats.add("rollout-0", load(100, 1.0, 1.0))
    stats.finish_step(stats.snapshot(state))
    stats.add("rollout-0", load(400, 4.0, 2.0))
    metrics = stats.snapshot(state).metrics
    assert metrics["idle/rollout"] == 0.25
    assert metrics["rollout/tok_per_s"] == 75.0
    assert (metrics["rollout/kv_util"], metrics["weights/pull_s"]) == (0.5, 0.25)


def test_the_hit_rate_of_the_prefix_cache_is_the_share_of_tokens_that_were_not_prefilled():
    stats, state = FleetStats(), HubState()
    for name in ("rollout-0", "rollout-1"):
        stats.add(name, structs.replace(load(0, 0.0, 0.0), prefilled=100, found=1000))
    stats.finish_step(stats.snapshot(state))
    stats.add("rollout-0", structs.replace(load(9, 1.0, 0.0), prefilled=140, found=1000))
    stats.add("rollout-1", structs.replace(load(9, 1.0, 0.0), prefilled=120, found=1180))
    assert stats.snapshot(state).metrics["rollout/prefix_cache_hit_rate"] == 0.75


def test_rollouts_add_up_and_a_dead_one_is_forgotten():
    stats, state = FleetStats(), HubState()
    for name in ("rollout-0", "rollout-1"):
        stats.add(name, load(0, 0.0, 0.0))
    stats.finish_step(stats.snapshot(state))
    for name in ("rollout-0", "rollout-1"):
        stats.add(name, load(50, 1.0, 0.0))
    snapshot = stats.snapshot(state)
    assert snapshot.metrics["rollout/tok_per_s"] == 100.0
    stats.finish_step(snapshot)
    stats.forget("rollout-1")
    stats.add("rollout-0", load(100, 2.0, 0.0))
    assert stats.snapshot(state).metrics["rollout/tok_per_s"] == 50.0


def test_the_counters_of_a_restarted_process_count_from_zero():
    """Its first report may arrive before its death is noticed, or a report of the dead one after."""
    stats, state = FleetStats(), HubState()
    for report in (load(500, 60.0, 40.0), load(0, 0.5, 0.5), load(60, 3.5, 1.5)):
        stats.add("rollout-0", report)
    metrics = stats.snapshot(state).metrics
    assert (metrics["idle/rollout"], metrics["rollout/tok_per_s"]) == (0.25, 15.0)


def test_a_role_without_reports_is_left_out():
    assert "idle/relay" not in FleetStats().snapshot(HubState()).metrics


def test_the_metrics_count_the_groups_of_the_queue():
    state = HubState()
    apply(ev.Opened(epoch=1, samples_per_prompt=1), state)
    apply(ev.Leased(group=GroupId(0, 0), samples=[0], attempt=1, version=0, holder="r"), state)
    metrics = FleetStats().snapshot(state).metrics
    assert (metrics["queue/leased"], metrics["queue/ready"]) == (1.0, 0.0)


def test_work_after_the_last_snapshot_of_a_step_belongs_to_the_next_step():
    stats, state = FleetStats(), HubState()
    stats.add("rollout-0", load(0, 0.0, 0.0))
    stats.count("repack/count")
    stats.add("rollout-0", load(10, 1.0, 0.0))
    assert stats.snapshot(state).metrics["repack/count"] == 1
    stats.count("repack/count")
    stats.add("rollout-0", load(30, 2.0, 0.0))
    last = stats.snapshot(state)
    assert (last.metrics["repack/count"], last.metrics["rollout/tok_per_s"]) == (2, 15.0)
    stats.count("repack/count", 5)
    stats.add("rollout-0", load(130, 3.0, 0.0))
    stats.finish_step(last)
    last = stats.snapshot(state)
    assert (last.metrics["repack/count"], last.metrics["rollout/tok_per_s"]) == (5, 100.0)
    stats.finish_step(last)
    assert "repack/count" not in stats.snapshot(state).metrics


def test_a_snapshot_changes_nothing():
    stats, state = FleetStats(), HubState()
    for report in (load(0, 0.0, 0.0), load(10, 1.0, 1.0)):
        stats.add("rollout-0", report)
    stats.count("repack/count")
    assert stats.snapshot(state) == stats.snapshot(state)


def test_a_process_that_restarts_after_the_last_snapshot_counts_from_zero_in_the_next_step():
    stats, state = FleetStats(), HubState()
    for report in (load(0, 0.0, 0.0), load(500, 60.0, 40.0)):
        stats.add("rollout-0", report)
    last = stats.snapshot(state)
    for report in (load(0, 0.5, 0.5), load(60, 3.5, 1.5)):
        stats.add("rollout-0", report)
    stats.finish_step(last)
    assert stats.snapshot(state).metrics["rollout/tok_per_s"] == 15.0
