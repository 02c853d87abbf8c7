"""The account of tokens of a hub that was started again knows what the hub before knew."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.hub_scene import FIRST, Restart

from headrace.comm.messages import DrawnTokens, HeldRows, LeaseGrant, LoadReport, QueueRestored, RowDone, RowRef
from headrace.relay.hub.token_ledger import step_metrics
from headrace.relay.journal import events as ev
from headrace.relay.journal.replay import replay

UNIT = ["relay-0#1"]
LOAD = LoadReport(version=0, num_running=1, num_waiting=0, kv_util=0, tokens=0, busy_s=1, idle_s=0, pull_s=0)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Restart]:
    scene = Restart(tmp_path)
    yield scene
    scene.close()


def done(grant: LeaseGrant, sample: int, drawn: DrawnTokens) -> RowDone:
    lease = grant.leases[0]
    return RowDone(lease.group.row(sample), lease.attempt, 0, UNIT, 9, 0.0, num_drawn=7, drawn=drawn)


def test_a_rollout_that_dies_after_a_restart_of_the_hub_has_lost_what_it_had_not_ended(scene: Restart):
    grant = scene.lease(request=FIRST + 1)
    scene.say("rollout-0", done(grant, 0, DrawnTokens(1, 20, 0)))
    scene.restart()
    scene.say("rollout-0", done(grant, 1, DrawnTokens(1, 30, 7)))
    scene.hub.on_process_death("rollout-0", "killed")
    (gone,) = [event for event in scene.events() if isinstance(event, ev.RolloutGone)]
    assert (gone.drawn, gone.ended) == (30, 14)
    found = scene.hub.tokens.totals()
    assert (found["ready"], found["lost"], found["unfinished"]) == (14, 16, 0)


def test_a_report_that_is_repeated_after_a_restart_counts_once(scene: Restart):
    grant = scene.lease(request=FIRST + 1)
    first, second = done(grant, 0, DrawnTokens(1, 20, 0)), done(grant, 1, DrawnTokens(1, 30, 7))
    scene.say("rollout-0", first)
    scene.restart()
    for message in (first, second, second):
        scene.say("rollout-0", message)
    found = scene.hub.tokens.totals()
    assert (found["generated"], found["ready"], found["superseded"], found["unfinished"]) == (30, 14, 0, 16)


def test_tokens_of_unfinished_trajectories_from_the_disk_are_known_to_the_next_hub(scene: Restart):
    group = scene.hub.prompts.pool.group_at(0)
    assert group is not None
    begun = [RowRef(group.row(n), 1, UNIT, 0, 9, is_partial=True, num_drawn=5) for n in range(2)]
    scene.say("relay-0", QueueRestored(0, 1, begun))
    assert scene.hub.tokens.totals()["restored"] == 10
    scene.say("relay-0", QueueRestored(0, 1, begun))
    assert scene.hub.tokens.totals()["restored"] == 10, "the report is repeated"
    scene.restart()
    grant = scene.lease(request=FIRST + 1)
    for sample in range(2):
        scene.say("rollout-0", done(grant, sample, DrawnTokens(1, 4, 7 * sample)))
    scene.hub.tokens.observe("rollout-0", HeldRows([], [], 1, DrawnTokens(1, 4, 14, 0)))
    account = scene.hub.tokens.account()
    assert account["holds"] and account["generated"] + account["restored"] == account["ready"] == 14, account
    assert replay(scene.path).tokens.begun == 10


def test_tokens_for_requests_are_counted_beside_the_account(scene: Restart):
    grant = scene.lease(request=FIRST + 1)
    scene.say("rollout-0", done(grant, 0, DrawnTokens(1, 20, 0, served=30)))
    scene.say("rollout-0", replace(LOAD, drawn=DrawnTokens(1, 20, 7, 13, served=40)))
    scene.say("rollout-0", done(grant, 1, DrawnTokens(1, 20, 7, served=35)))
    now = scene.hub.tokens.at_step_end()
    assert (now["served"], now["generated"], now["ready"], now["lost"], now["unfinished"]) == (40, 20, 14, 0, 6)
    assert dict(step_metrics(now, {"served": 15}))["tokens/served"] == 25.0
    scene.hub.on_process_death("rollout-0", "killed")
    account = scene.hub.tokens.account()
    assert account["served"] == 40 and account["holds"] and account["lost"] == 6
