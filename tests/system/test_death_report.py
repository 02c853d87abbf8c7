"""The hub learns of a killed process from the end of its connection, long before it has been silent for too long."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import TypeVar

import pytest

from headrace.comm.fleet import StoreFleet
from headrace.comm.messages import Stop
from headrace.comm.recipe import BatchSettings, CommSettings, QueueSettings, Recipe, RepackSettings, RunSettings
from headrace.comm.store.server import StoreServer
from headrace.comm.waits import waiting
from headrace.relay import loop as relay_loop
from headrace.relay.dataset.order import PromptPool
from headrace.relay.dataset.rows import JsonLines
from headrace.relay.hub.hub import Hub
from headrace.relay.hub.loop import HubLoop
from headrace.relay.journal.events import Event, Leased, Opened, Returned
from headrace.relay.journal.files import read_events
from headrace.relay.journal.journal import Journal
from headrace.relay.journal.state import HubState
from headrace.relay.queue.admission import Admission

E = TypeVar("E", bound=Event)
PATIENCE_S = 60.0
NEVER_S = 1e5

ROLLOUT = """
import sys
from headrace.comm.fleet import StoreFleet
from headrace.comm.messages import Stop
from headrace.comm.messages import LeaseRequest
from headrace.comm.recipe import CommSettings
fleet = StoreFleet.join(sys.argv[1], "rollout", 0, b"s", {}, CommSettings())
mailbox = fleet.open_mailbox(fleet.name)
mailbox.send("hub", LeaseRequest(1, 0, 2))
mailbox.receive(60)
print("leased", flush=True)
sys.stdin.readline()
"""


class Processes:
    """A store, a hub, a relay's loop in a thread, and a rollout in a process that takes two leases."""

    def __init__(self, folder: Path) -> None:
        self.hosted = StoreServer("127.0.0.1", b"s").start()
        self.settings = CommSettings(expiry_s=NEVER_S, deadline_s=PATIENCE_S)
        self.fleets = {role: self.join(role) for role in ("hub", "relay")}
        recipe = Recipe(comm=self.settings, run=RunSettings(dir=str(folder)))
        self.relay = threading.Thread(target=relay_loop.run, args=(self.fleets["relay"], recipe), daemon=True)
        self.relay.start()
        (folder / "data.jsonl").write_text('{"prompt": "p"}\n' * 5)
        queue = QueueSettings()
        self.hub = Hub(
            self.fleets["hub"].open_mailbox("hub"),
            HubState(),
            Journal(folder / "journal.jsonl"),
            PromptPool(JsonLines(folder / "data.jsonl"), shuffle=False, seed=0),
            Admission(BatchSettings(prompts_per_step=2, samples_per_prompt=2), queue, num_steps=10),
            queue,
            RepackSettings(),
        )
        self.hub.context.commit(Opened(epoch=1, samples_per_prompt=2))
        self.loop = HubLoop(self.hub, self.fleets["hub"])
        command = [sys.executable, "-c", ROLLOUT, self.hosted.address]
        self.rollout = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def join(self, role: str) -> StoreFleet:
        return StoreFleet.join(self.hosted.address, role, 0, b"s", {}, self.settings)

    def step_until(self, kind: type[E], count: int) -> list[E]:
        with waiting("hub", kind.__name__, PATIENCE_S) as wait:
            while len(found := [event for event in self.events() if isinstance(event, kind)]) < count:
                assert self.loop.step() is None
                wait.check()
        return found

    def events(self) -> list[Event]:
        return [event for _, event in read_events(self.hub.context.journal.path)]

    def close(self) -> None:
        self.rollout.kill()
        self.rollout.communicate(timeout=PATIENCE_S)
        self.hub.mailbox.send("relay-0", Stop("the test ends"))
        self.relay.join(PATIENCE_S)
        self.hub.context.journal.close()
        for fleet in self.fleets.values():
            fleet.leave()
        self.hosted.close()


@pytest.fixture
def run(tmp_path: Path):
    run = Processes(tmp_path)
    yield run
    run.close()


def test_the_leases_of_a_killed_process_return_when_its_connection_ends(run: Processes):
    """Its silence cannot report the death here: it may last for a day."""
    leased = run.step_until(Leased, 2)
    assert run.rollout.stdout is not None and run.rollout.stdout.readline() == "leased\n"
    assert not [event for event in run.events() if isinstance(event, Returned)]
    run.rollout.kill()
    returned = run.step_until(Returned, 2)
    assert [(e.group, e.attempt) for e in returned] == [(e.group, e.attempt) for e in leased]
    assert {e.reason for e in returned} == {"incarnation 1 is gone"}
    assert run.hub.state.is_balanced
