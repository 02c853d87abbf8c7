"""A rollout's leases: which grants it keeps when its weights change, and the versions of its rows."""

from random import Random

import msgspec
import pytest
from support.in_memory import MemoryMailboxes

from headrace.comm.messages import GroupId, Lease, LeaseGrant, LeaseRequest, LeaseReturn, Message
from headrace.relay.queue.schedules import SCHEDULES
from headrace.rollout.engine.sequence import Completion
from headrace.rollout.leased_row import LeasedRow
from headrace.rollout.leases import HeldLeases
from headrace.rollout.pacing import RolloutPacing

GROUP = GroupId(0, 5)


class Desk:
    """The leases of one rollout, and the hub's inbox."""

    def __init__(self, schedule: str = "headrace") -> None:
        self.mailboxes = MemoryMailboxes()
        self.hub = self.mailboxes.open("hub")
        pacing = RolloutPacing.of(SCHEDULES[schedule], prompts_per_step=4, num_rollouts=1)
        self.leases = HeldLeases(self.mailboxes.open("rollout-0"), 1, samples_per_prompt=2, pacing=pacing)

    def request(self, version: int) -> LeaseRequest:
        self.leases.ask(version, room=2)
        (request,) = self.heard()
        assert isinstance(request, LeaseRequest)
        return request

    def heard(self) -> list[Message]:
        found = []
        while (envelope := self.hub.receive(0)) is not None:
            found.append(envelope.message)
        return found


@pytest.fixture
def desk() -> Desk:
    return Desk()


def grant(request: LeaseRequest) -> LeaseGrant:
    return LeaseGrant(request.request_id, request.version, [Lease(GROUP, 1, [0, 1], msgspec.Raw(b"{}"))])


def test_a_grant_of_the_present_request_starts_on_the_weights_that_came_meanwhile(desk: Desk):
    request = desk.request(version=3)
    desk.leases.begin_version(4)
    ((_, rows),) = desk.leases.take(grant(request), version=4)
    assert [row.version for row in rows] == [4, 4] and not desk.heard()


def test_a_second_answer_to_a_request_that_was_repeated_starts_nothing(desk: Desk):
    request = desk.request(version=3)
    assert desk.leases.take(grant(request), version=3)
    assert not desk.leases.take(grant(request), version=3) and not desk.heard()


def test_leases_for_a_request_that_was_answered_without_any_go_back(desk: Desk):
    """The hub died after its answer, and its next process, which read the request again, had work."""
    request = desk.request(version=3)
    desk.leases.take(LeaseGrant(request.request_id, request.version, []), version=3)
    assert not desk.leases.take(grant(request), version=3) and not desk.leases.held
    assert desk.heard() == [LeaseReturn([GROUP], [1])]
    later = desk.request(version=3)
    assert desk.leases.take(grant(later), version=3)
    assert not desk.leases.take(grant(request), version=3)
    assert desk.heard() == [LeaseReturn([GROUP], [1])], "they do not answer the last request with leases"


def test_the_versions_of_a_response_are_those_that_drew_its_tokens():
    random = Random(0)
    for _ in range(200):
        num_prompt, num_tokens = random.randint(1, 5), random.randint(0, 6)
        positions = sorted(random.choices(range(num_prompt, num_prompt + num_tokens + 1), k=random.randint(0, 4)))
        row = LeasedRow(GROUP.row(0), 1, 0, {}, switches=[(at, i + 1) for i, at in enumerate(positions)])
        assert row.drawn_by() == set(), "unfinished"
        row.completion = Completion(1, [0] * num_prompt, [0] * num_tokens, [0.0] * num_tokens, "stop")
        assert row.drawn_by() == set(row.token_versions().tolist())


def test_a_grant_of_an_older_request_goes_back_after_a_change_of_weights(desk: Desk):
    older = desk.request(version=3)
    desk.leases.begin_version(4)
    desk.request(version=4)
    assert not desk.leases.take(grant(older), version=4)
    (returned,) = desk.heard()
    assert isinstance(returned, LeaseReturn) and returned.groups == [GROUP]


@pytest.mark.parametrize("schedule", ["headrace", "partial"])
def test_a_grant_of_the_present_request_goes_back_if_the_weights_are_older_by_then(schedule: str):
    """Also where newer weights may continue what older ones began."""
    desk = Desk(schedule)
    request = desk.request(version=6)
    assert not desk.leases.take(grant(request), version=5)
    (returned,) = desk.heard()
    assert isinstance(returned, LeaseReturn) and returned.groups == [GROUP], "the hub has counted with version 6"


def test_where_versions_mix_a_grant_of_an_older_request_starts_on_the_present_weights():
    desk = Desk("partial")
    older = desk.request(version=3)
    desk.leases.begin_version(4)
    desk.request(version=4)
    ((_, rows),) = desk.leases.take(grant(older), version=4)
    assert [row.version for row in rows] == [4, 4] and not desk.heard()


def test_a_rollout_takes_its_part_of_the_window_where_that_is_more_than_its_part_of_a_step(desk: Desk):
    asked: list[int] = []
    for version, window in ((0, 0), (1, 3), (2, 30), (3, 300), (4, 0), (5, 0)):
        desk.leases.begin_version(version)
        desk.leases.ask(version, room=100)
        (request,) = desk.heard()
        assert isinstance(request, LeaseRequest)
        asked.append(request.num_groups)
        desk.leases.take(LeaseGrant(request.request_id, version, [], window), version)
    assert asked == [4, 4, 4, 30, 50, 50], "a grant without a window changes nothing; it has room for 50"


def evaluation_of(request: LeaseRequest, num_groups: int) -> LeaseGrant:
    groups = [GroupId(0, index, is_evaluation=True) for index in range(num_groups)]
    leases = [Lease(group, 1, [0, 1], msgspec.Raw(b"{}")) for group in groups]
    return LeaseGrant(request.request_id, request.version, leases)


def test_after_prompts_of_an_evaluation_it_asks_for_more_of_them_until_none_are_left(desk: Desk):
    desk.leases.take(evaluation_of(desk.request(version=3), 1), version=3)
    assert desk.leases.pins_version
    desk.leases.ask(3, room=2, is_outdated=True)
    (request,) = desk.heard()
    assert isinstance(request, LeaseRequest) and request.only_evaluation
    desk.leases.take(LeaseGrant(request.request_id, 3, []), version=3)
    assert desk.leases.pins_version, "a sample is unfinished"
    desk.leases.held.clear()
    assert not desk.leases.pins_version
    desk.leases.ask(3, room=2, is_outdated=True)
    assert not desk.heard(), "a newer version comes first"


def test_prompts_of_an_evaluation_take_nothing_of_the_share_of_a_version(desk: Desk):
    desk.leases.take(evaluation_of(desk.request(version=3), 9), version=3)
    desk.leases.ask(3, room=8)
    (request,) = desk.heard()
    assert isinstance(request, LeaseRequest)
    desk.leases.take(LeaseGrant(request.request_id, 3, []), version=3)
    desk.leases.ask(3, room=8)
    (request,) = desk.heard()
    assert isinstance(request, LeaseRequest)
    assert (request.num_groups, request.only_evaluation) == (4, False), "the whole share"
