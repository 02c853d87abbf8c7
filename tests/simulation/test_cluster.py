"""Messages of a simulated cluster: in which order they arrive, and which are lost."""

from collections.abc import Callable

import pytest
from simulation.cluster import Cluster

from headrace.comm.mailbox import Mailbox
from headrace.comm.messages import DropRows
from headrace.comm.recipe import CommSettings
from headrace.launch.lab.virtual.world import World


class Post:
    """A relay with two inboxes, and the hub, which reads; `at` lets the relay do something at a moment."""

    def __init__(self) -> None:
        self.world = World()
        self.cluster = Cluster(self.world, "run", CommSettings(), unit_rows=1)
        self.relay = self.cluster.join("relay", 0).process
        self.cluster.join("hub", 0)
        open_mailbox = self.cluster.mailboxes.open
        self.hub: Mailbox = open_mailbox("hub")
        self.rows: Mailbox = open_mailbox("relay-0")
        self.weights: Mailbox = open_mailbox("relay-0/weights")

    def at(self, moment: float, act: Callable[[], None]) -> None:
        self.world.at(moment, act)

    def send(self, moment: float, mailbox: Mailbox, text: str) -> None:
        self.at(moment, lambda: mailbox.send("hub", DropRows([text])))

    def read(self) -> list[str]:
        """The messages that have arrived at the hub after 10 s."""
        self.world.run_to(10.0)
        texts: list[str] = []
        while (envelope := self.hub.receive(0.0)) is not None:
            assert isinstance(envelope.message, DropRows)
            texts += envelope.message.keys
        return texts


@pytest.fixture
def post() -> Post:
    """The relay is slow until 1.0 s: its messages leave 0.5 s later."""
    post = Post()
    post.cluster.mailboxes.slow["relay-0"] = 0.5, 1.0
    return post


def test_messages_of_a_process_arrive_in_the_order_in_which_it_sent_them(post: Post):
    post.send(0.9, post.rows, "slow")
    post.send(1.1, post.weights, "of another inbox")
    post.send(1.2, post.rows, "last")
    assert post.read() == ["slow", "of another inbox", "last"]


def test_messages_that_a_slow_process_has_not_sent_yet_are_lost_with_it(post: Post):
    post.send(0.1, post.rows, "sent")
    post.send(0.9, post.rows, "not sent")
    post.at(1.0, lambda: post.cluster.kill("relay-0", is_noticed=True))
    assert post.read() == ["sent"]


def test_a_frozen_process_sends_later_what_it_has_not_sent_yet(post: Post):
    post.send(0.9, post.rows, "slow")
    post.at(1.0, lambda: setattr(post.relay, "frozen_until", 3.0))
    post.send(3.0, post.weights, "last")
    post.world.run_to(2.0)
    assert post.hub.receive(0.0) is None
    assert post.read() == ["slow", "last"]


def test_a_frozen_relay_gets_a_version_once_it_goes_on(post: Post):
    weights, trainer = post.cluster.weights, post.cluster.join("actor", 0).process
    post.weights.close()
    weights.add_relay(post.relay)
    post.relay.frozen_until = 3.0
    post.at(1.0, lambda: weights.publish(0, "digest"))
    post.world.run_to(2.9)
    assert weights.newest() is None and not trainer.is_dead
    post.world.run_to(3.1)
    assert weights.newest() is not None
