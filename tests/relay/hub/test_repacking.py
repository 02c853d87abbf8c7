"""The hub's part in repacking: when it plans, which moves it orders, and which rollout has a moved trajectory."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hub_scene import Scene
from support.in_memory import MemoryFleet

from headrace.comm.messages import HeldRows, LeaseGrant, LoadReport, Message, RowDone, RowId, VersionReady
from headrace.comm.messages.migration import ClaimResult, ClaimRows, MigrateOrder, MigrateResult, RowsReassigned
from headrace.comm.recipe import RepackSettings
from headrace.relay.hub.shutdown import Shutdown
from headrace.relay.journal import events as ev
from headrace.relay.journal.records import RowStatus
from headrace.relay.journal.replay import replay

PERIOD_S = RepackSettings().period_s
PATIENCE_S = 10.0


class Tail(Scene):
    """A hub and two rollouts that wind down."""

    def report(self, rollout: str, kv_used: int, version: int = 0, num_requests: int = 2) -> None:
        self.say(rollout, load(kv_used, version, num_requests))

    def plans(self, kv_used: dict[str, int], version: int = 0) -> list[Message]:
        """The messages that the rollouts get when these reports are due for a plan."""
        for rollout, used in kv_used.items():
            self.report(rollout, used, version)
        self.now += PERIOD_S
        self.hub.advance()
        return [message for name in kv_used for message in self.heard(name)]

    def winding_down(self) -> tuple[LeaseGrant, MigrateOrder]:
        """A group at rollout-0, and the order to give it to rollout-1."""
        grant = self.lease("rollout-0")
        assert self.plans({"rollout-0": 60, "rollout-1": 80}) == []
        (order,) = self.plans({"rollout-0": 50, "rollout-1": 70})
        assert isinstance(order, MigrateOrder)
        return grant, order

    def claim(self, rollout: str, rows: list[RowId], attempt: int = 1, request_id: int = 1) -> list[int]:
        self.say(rollout, ClaimRows(request_id, rows, [attempt] * len(rows)))
        answers = [message for message in self.heard(rollout) if isinstance(message, ClaimResult)]
        assert answers[-1].request_id == request_id
        return answers[-1].attempts


def load(kv_used: int, version: int = 0, num_requests: int = 2, kv_fixed: int = 10_000) -> LoadReport:
    idle = {"num_waiting": 0, "kv_util": 0.5, "tokens": 0, "busy_s": 0.0, "idle_s": 0.0, "pull_s": 0.0}
    return LoadReport(
        version=version,
        num_running=num_requests,
        **idle,
        kv_used=kv_used,
        kv_max=1000,
        kv_fixed=kv_fixed,
        batch_bound=16,
    )


def rows_of(grant: LeaseGrant) -> list[RowId]:
    (lease,) = grant.leases
    return [lease.group.row(sample) for sample in lease.samples]


@pytest.fixture
def tail(tmp_path: Path) -> Iterator[Tail]:
    scene = Tail(tmp_path)
    yield scene
    scene.close()


def test_it_orders_the_lesser_load_to_the_greater_once_both_wind_down(tail: Tail):
    _, order = tail.winding_down()
    assert order == MigrateOrder(1, 0, "rollout-1")


def test_rollouts_are_packed_once_the_cache_slows_their_steps_by_the_bound_at_most(tmp_path: Path):
    tail = Tail(tmp_path)
    for used, moves in ((70, []), (60, []), (50, [MigrateOrder(1, 0, "rollout-1")])):
        for rollout in ("rollout-0", "rollout-1"):
            tail.say(rollout, load(used, kv_fixed=50))
        tail.now += PERIOD_S
        tail.hub.advance()
        assert [message for rollout in ("rollout-0", "rollout-1") for message in tail.heard(rollout)] == moves
    tail.close()


def test_it_plans_right_after_a_new_version_and_else_when_the_period_is_over(tail: Tail):
    tail.plans({"rollout-0": 60, "rollout-1": 80})
    for rollout, used in {"rollout-0": 50, "rollout-1": 70}.items():
        tail.report(rollout, used)
    assert tail.heard("rollout-0") == []
    tail.say("relay-0/weights", VersionReady(1, "digest"))
    assert isinstance(tail.heard("rollout-0")[0], MigrateOrder)


def test_the_rollouts_of_a_move_get_no_other_until_it_has_ended_and_both_have_reported_again(tail: Tail):
    _, order = tail.winding_down()
    assert tail.plans({"rollout-0": 10, "rollout-1": 20}) == []
    tail.say("rollout-0", MigrateResult(order.request_id, refusal="full"))
    assert tail.hub.repacking.refusals == {"full": 1}
    (again,) = tail.plans({"rollout-0": 10, "rollout-1": 20})
    assert isinstance(again, MigrateOrder) and again.request_id > order.request_id


def test_the_death_of_a_rollout_frees_the_other_for_the_next_plan(tail: Tail):
    tail.winding_down()
    tail.hub.on_process_death("rollout-0", "dead")
    tail.boxes["rollout-2"] = tail.mailboxes.open("rollout-2")
    assert tail.plans({"rollout-1": 60, "rollout-2": 50}) == []
    (order,) = tail.plans({"rollout-1": 55, "rollout-2": 45})
    assert order == MigrateOrder(2, 0, "rollout-1")


def test_trajectories_never_move_between_rollouts_on_different_versions(tail: Tail):
    for used in (60, 50, 40):
        tail.report("rollout-1", used + 10, version=1)
        assert tail.plans({"rollout-0": used}) == []


@pytest.mark.parametrize("is_enabled", [False, True])
def test_no_move_is_planned_where_repacking_is_disabled_or_the_run_ends(tmp_path: Path, is_enabled: bool):
    tail = Tail(tmp_path, repack=RepackSettings(period_s=PERIOD_S if is_enabled else 0))
    if is_enabled:
        tail.hub.context.is_leasing = False
    for used in (60, 50, 40):
        assert tail.plans({"rollout-0": used, "rollout-1": used + 10}) == []
    tail.close()


def test_a_claim_gives_the_rows_to_the_claimer_and_voids_the_older_attempt(tail: Tail):
    grant, order = tail.winding_down()
    rows = rows_of(grant)
    assert tail.claim("rollout-1", rows) == [2, 2]
    assert tail.heard("rollout-0") == [RowsReassigned(rows, [1, 1])]
    tail.say("rollout-0", RowDone(rows[0], 1, 0, ["relay-0#1"], 5, 1.0))
    assert tail.hub.results.num_fenced == 1
    tail.say("rollout-1", RowDone(rows[0], 2, 0, ["relay-0#1"], 5, 1.0))
    row = tail.hub.state.row(rows[0])
    assert row is not None and row.status is RowStatus.READY
    tail.say("rollout-0", MigrateResult(order.request_id, 2, 100))
    metrics = tail.hub.fleet_stats.snapshot(tail.hub.state).metrics
    assert (metrics["repack/count"], metrics["repack/trajectories"], metrics["repack/bytes"]) == (1, 2, 100)
    assert tail.hub.state.num_moved == 2
    assert replay(tail.path) == tail.hub.state


def test_of_source_and_destination_the_first_to_claim_has_the_rows(tail: Tail):
    rows = rows_of(tail.lease("rollout-0"))
    assert tail.claim("rollout-0", rows) == [2, 2]
    assert tail.claim("rollout-1", rows) == [0, 0]
    assert tail.hub.state.num_moved == 0
    assert tail.heard("rollout-0") == []


def test_a_claim_that_is_repeated_is_answered_the_same(tail: Tail):
    rows = rows_of(tail.lease("rollout-0"))
    assert tail.claim("rollout-1", rows) == tail.claim("rollout-1", rows) == [2, 2]
    assert tail.hub.state.num_moved == 2


def test_rows_of_a_dead_source_are_leased_again_and_a_late_claim_is_void(tail: Tail):
    rows = rows_of(tail.lease("rollout-0"))
    tail.hub.on_process_death("rollout-0", "dead")
    assert tail.claim("rollout-1", rows) == [0, 0]
    again = tail.lease("rollout-1", request=2)
    assert rows_of(again) == rows and again.leases[0].attempt == 2
    assert tail.claim("rollout-0", rows) == [0, 0]


def test_rows_of_a_group_at_two_rollouts_come_back_only_from_the_one_that_died(tail: Tail):
    rows = rows_of(tail.lease("rollout-0"))
    tail.boxes["rollout-2"] = tail.mailboxes.open("rollout-2")
    assert tail.claim("rollout-1", rows[:1]) == [2]
    assert tail.claim("rollout-2", rows[1:]) == [3]
    tail.hub.on_process_death("rollout-1", "dead")
    kept = tail.hub.state.row(rows[1])
    assert kept is not None and (kept.status, kept.holder) == (RowStatus.LEASED, "rollout-2")


@pytest.mark.parametrize("is_claimed", [False, True])
def test_rows_that_source_and_destination_hold_when_the_run_ends_count_once(tail: Tail, is_claimed: bool):
    rows = rows_of(tail.lease("rollout-0"))
    hub = MemoryFleet.join_network(tail.network, "hub")
    for index in range(2):
        MemoryFleet.join_network(tail.network, "rollout", index)
        tail.boxes[f"rollout-{index}"].send("hub", HeldRows(rows, [1, 1]))
    if is_claimed:
        tail.claim("rollout-1", rows)  # the rollouts do not read the answer
    summary = Shutdown(tail.hub, hub, PATIENCE_S).run(ev.Ending(status="interrupted"))
    assert (summary["accounting"]["in_flight"], summary["accounting"]["holds"]) == (2, True)
    assert summary["moved"] == 2 * is_claimed


@pytest.mark.parametrize(("status", "waited_s"), [("interrupted", 0.5), ("failed", 0.0)])
def test_the_trainer_of_an_interrupted_run_has_time_for_its_last_checkpoint(tail: Tail, status: str, waited_s: float):
    hub = MemoryFleet.join_network(tail.network, "hub")
    MemoryFleet.join_network(tail.network, "actor")
    started = time.monotonic()
    Shutdown(tail.hub, hub, deadline_s=0.01, grace_s=0.5).run(ev.Ending(status=status))
    assert waited_s <= time.monotonic() - started < waited_s + 0.4


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.sampled_from(["claim", "done", "lose", "lease"]))))
def test_however_claims_and_deaths_interleave_each_row_ends_at_most_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, str]]
):
    tail = Tail(tmp_path_factory.mktemp("hub"))
    tail.boxes["rollout-2"] = tail.mailboxes.open("rollout-2")
    rows, ends = rows_of(tail.lease("rollout-0")), 0
    for request, (index, attempt, action) in enumerate(steps, 2):
        rollout = f"rollout-{index}"
        num_failed = tail.hub.state.account.failed
        match action:
            case "claim":
                tail.claim(rollout, rows, attempt, request_id=request)
            case "done":
                tail.say(rollout, RowDone(rows[0], attempt, 0, [], 5, None, failure="it ends here"))
                ends += tail.hub.state.account.failed - num_failed
            case "lose":
                tail.hub.on_process_death(rollout, "dead")
            case _ if rows[0] in [r for g in tail.hub.state.unassigned for r in [g.row(0)]]:
                tail.heard(rollout)
                tail.lease(rollout, request=request)
        assert tail.hub.state.is_balanced
    assert ends <= 1 and replay(tail.path) == tail.hub.state
    tail.close()
