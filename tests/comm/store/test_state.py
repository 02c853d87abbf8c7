"""The state of the store, by examples and against a model of messages under way."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.store.members import Member
from headrace.comm.store.protocol import (
    AddTo,
    Announce,
    Answer,
    Beat,
    Changed,
    CloseInbox,
    Confirm,
    DeleteValue,
    Delivery,
    GetValue,
    Join,
    Leave,
    OpenInbox,
    Post,
    Request,
    SetValue,
    Watch,
)
from headrace.comm.store.state import StoreState


class Play:
    """A state, and what each client has received."""

    def __init__(self) -> None:
        self.state = StoreState()
        self.received: dict[int, list[object]] = defaultdict(list)
        self.now = 0.0

    def does(self, client: int, *requests: Request) -> None:
        for request in requests:
            self.state.handle(client, request, self.now)
        self.take()

    def closes(self, client: int) -> None:
        self.state.on_closed(client)
        self.take()

    def take(self) -> None:
        for client, pushes in self.state.outgoing.items():
            self.received[client] += pushes
        self.state.outgoing.clear()

    def deliveries(self, client: int) -> list[int]:
        return [push.sequence for push in self.received[client] if isinstance(push, Delivery)]

    def answers(self, client: int) -> list[int | bytes | None]:
        return [push.value for push in self.received[client] if isinstance(push, Answer)]

    def told(self, client: int) -> list[tuple[str, int, bool]]:
        """The members in the last change that a client was told of."""
        self.state.tell_changes()
        self.take()
        changes = [push for push in self.received[client] if isinstance(push, Changed)]
        return [(m.name, m.incarnation, m.is_alive) for m in changes[-1].members] if changes else []


def member(name: str = "rollout-0") -> Member:
    role, _, index = name.partition("-")
    return Member(name, role, int(index or 0), 0, "here", 1, {})


def test_a_member_is_dead_when_its_connection_ends_and_the_next_one_has_the_next_incarnation():
    play = Play()
    play.does(1, Watch(1, "rollout"))
    play.does(2, Join(1, member(), 5.0))
    assert play.told(1) == [("rollout-0", 1, True)]
    play.closes(2)
    assert play.told(1) == [("rollout-0", 1, False)]
    play.does(3, Join(1, member(), 5.0))
    assert play.told(1) == [("rollout-0", 2, True)]
    assert play.answers(3) == [2]


def test_the_connection_of_an_earlier_incarnation_that_ends_late_changes_nothing():
    play = Play()
    play.does(1, Watch(1, "rollout"))
    play.does(2, Join(1, member(), 5.0))
    play.does(3, Join(1, member(), 5.0))
    play.closes(2)
    assert play.told(1) == [("rollout-0", 2, True)]
    play.does(2, Announce({"late": "yes"}))
    assert play.told(1) == [("rollout-0", 2, True)]


def test_a_silent_member_is_dead_until_it_is_heard_and_time_in_which_the_store_stood_still_does_not_count():
    play = Play()
    play.does(1, Watch(1, ""))
    play.does(2, Join(1, member(), 5.0))
    play.state.look(104.0, pause_s=100.0)
    assert play.told(1) == [("rollout-0", 1, True)]
    play.state.look(105.5)
    assert play.told(1) == [("rollout-0", 1, False)]
    play.now = 106.0
    play.does(2, Beat())
    assert play.told(1) == [("rollout-0", 1, True)]
    play.state.look(106.5)
    assert play.state.num_present(silence_s=1.0) == 1
    play.state.look(108.0)
    assert play.state.num_present(silence_s=1.0) == 0


def test_a_member_that_is_heard_first_after_a_pause_of_the_store_has_no_more_time_than_another():
    play = Play()
    play.does(1, Watch(1, ""))
    play.does(2, Join(1, member(), 5.0))
    play.now = 104.0
    play.does(2, Beat())
    play.state.look(104.0, pause_s=100.0)
    play.state.look(110.0)
    assert play.told(1) == [("rollout-0", 1, False)]


def test_a_pause_of_the_store_leaves_its_members_present():
    """Its process looks for present members in another thread, which may be the first to go on."""
    play = Play()
    play.does(2, Join(1, member(), 5.0))
    play.state.look(1.0)
    play.now = 101.0
    assert play.state.num_present(silence_s=10.0) == 1
    play.state.look(101.0, pause_s=99.9)
    assert play.state.num_present(silence_s=10.0) == 1


def test_a_member_that_leaves_is_told_as_left_and_its_closed_connection_is_no_death():
    play = Play()
    play.does(1, Watch(1, "rollout"))
    play.does(2, Join(1, member(), 5.0), Leave(2))
    play.closes(2)
    assert play.told(1) == []
    changes = [push for push in play.received[1] if isinstance(push, Changed)]
    assert changes[-1].left == ["rollout-0"]
    assert play.state.num_joined == 1 and play.state.num_present(60.0) == 0


def test_only_those_who_asked_for_a_role_are_told_of_it():
    play = Play()
    play.does(1, Watch(1, "relay"))
    play.does(2, Watch(1, ""))
    play.does(3, Join(1, member(), 5.0))
    assert play.told(1) == [] and play.told(2) == [("rollout-0", 1, True)]


def test_values_are_kept_awaited_added_to_and_dropped():
    play = Play()
    play.does(1, GetValue(1, "k"), GetValue(2, "k", waits=True), AddTo(3, "n", 4), AddTo(4, "n", -1))
    assert play.received[1] == [Answer(1, None), Answer(3, 4), Answer(4, 3)]
    play.does(2, SetValue(1, "k", b"v"), DeleteValue(2, "k"), GetValue(3, "k"))
    assert play.received[1][-1] == Answer(2, b"v") and play.answers(2) == [None, None, None]


def test_a_client_that_ends_waits_for_no_value_any_more():
    play = Play()
    play.does(1, GetValue(1, "k", waits=True))
    play.does(2, GetValue(1, "k", waits=True))
    play.closes(1)
    play.does(3, SetValue(1, "k", b"v"))
    assert play.answers(1) == [] and play.answers(2) == [b"v"]


def test_messages_wait_for_a_reader_and_after_its_death_for_the_next_one():
    play = Play()
    play.does(1, Post("relay-0", "hub", 1, b""))
    play.does(2, OpenInbox(1, "relay-0"))
    play.does(1, Post("relay-0", "hub", 2, b""))
    assert play.deliveries(2) == [1, 2]
    play.closes(2)
    play.does(1, Post("relay-0", "hub", 3, b""))
    play.does(3, OpenInbox(1, "relay-0"))
    assert play.deliveries(3) == [3] and play.answers(3) == [2]


def test_nothing_is_kept_for_an_inbox_after_its_last_close_until_it_is_opened_again():
    play = Play()
    play.does(2, OpenInbox(1, "relay-0"), CloseInbox(2, "relay-0", is_last=True))
    play.does(1, Post("relay-0", "hub", 1, b""))
    play.does(3, OpenInbox(1, "relay-0"))
    play.does(1, Post("relay-0", "hub", 2, b""))
    assert play.deliveries(2) == [] and play.deliveries(3) == [2]


def test_a_reader_of_before_neither_confirms_nor_closes_the_inbox_of_the_next_one():
    play = Play()
    play.does(1, OpenInbox(1, "hub", confirms=True))
    play.does(9, Post("hub", "relay-0", 1, b""))
    play.does(2, OpenInbox(1, "hub", confirms=True))
    play.does(1, Confirm("hub", 1), CloseInbox(2, "hub", is_last=True))
    play.does(9, Post("hub", "relay-0", 2, b""))
    play.does(3, OpenInbox(1, "hub", confirms=True))
    assert play.deliveries(2) == [1, 2] and play.deliveries(3) == [1, 2]


@given(st.lists(st.sampled_from(["post", "open", "die", "confirm"]), max_size=60))
def test_the_hubs_messages_come_in_order_and_again_until_they_are_confirmed(steps: list[str]):
    """Whatever happens to its readers, the next one gets every message above the highest that was confirmed."""
    play = Play()
    posted = confirmed = 0
    reader = 0
    is_open = False
    for step in [*steps, "die", "open"]:
        if step == "post":
            posted += 1
            play.does(1, Post("hub", "relay-0", posted, b""))
        elif step == "open" and not is_open:
            reader += 1
            is_open = True
            play.does(100 + reader, OpenInbox(1, "hub", confirms=True))
            assert play.deliveries(100 + reader) == list(range(confirmed + 1, posted + 1))
        elif step == "die" and is_open:
            is_open = False
            play.closes(100 + reader)
        elif step == "confirm" and is_open:
            confirmed = (confirmed + posted + 1) // 2
            play.does(100 + reader, Confirm("hub", confirmed))
        if is_open:
            found = play.deliveries(100 + reader)
            assert found == list(range(posted - len(found) + 1, posted + 1))
