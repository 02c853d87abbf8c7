"""The hub: events per second through its mailbox and journal, and the time to read a journal again.

python -m headrace.launch.bench.hub FOLDER STORE_ADDRESS      (the hub's process)
"""

import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from ...comm.fleet import Fleet
from ...comm.mailbox import Mailbox
from ...comm.messages import (
    GroupId,
    LeaseGrant,
    LeaseRequest,
    Message,
    RequestRows,
    RowDone,
    StepTrained,
    Stop,
    TrainBatch,
    TrainingDone,
)
from ...comm.recipe import BatchSettings, CommSettings, DataSettings, QueueSettings, Recipe, RunSettings
from ...comm.store import StoreServer
from ...comm.waits import waiting
from ...relay.hub.loop import run
from ...relay.journal import events as ev
from ...relay.journal.journal import Journal, replay
from ...relay.journal.state import HubState, apply
from .harness import Child, Measurement, Options, command

M = TypeVar("M", bound=Message)

_SECRET = b"benchmark"
_PROMPTS, _SAMPLES, _STEPS = 64, 8, 60
_PATIENCE_S = 120.0


def hub_events(options: Options) -> list[Measurement]:
    """Events per second of the hub's own process, journal on, while one process plays all rollouts and the trainer."""
    hosted = StoreServer("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "data.jsonl").write_text('{"prompt": "p"}\n' * 1000)
        with Child(command("hub", folder, hosted.address)) as hub:
            fleet = Fleet.join(hosted.address, "actor", 0, _SECRET, {}, CommSettings())
            _play(fleet.open_mailbox("rollout-0"), fleet.open_mailbox("actor-0"))
            assert hub.process.wait(_PATIENCE_S) == 0
            fleet.leave()
        journal = Path(folder) / "journal.jsonl"
        lines = [msgspec.json.decode(line) for line in journal.read_bytes().splitlines()]
        state = replay(journal)
    assert state.step == _STEPS and state.is_balanced, f"step {state.step}"
    # The first steps are those in which processes start and files are opened.
    measured = [line["t"] for line in lines if "t" in line][len(lines) // 5 : -1]
    rate = len(measured) / (measured[-1] - measured[0])
    return [Measurement("hub-events", "5,000 a second", rate, "1/s", rate / 5000)]


def _play(rollout: Mailbox, actor: Mailbox) -> None:
    """All rollouts in one thread, the trainer in this one."""
    step = [0]
    playing = threading.Thread(target=_generate, args=(rollout, step), name="rollouts")
    playing.start()
    while step[0] < _STEPS:
        received, total = 0, 1
        while received < total:
            actor.send("hub", RequestRows(step[0] * _PROMPTS + received, ["train"], step[0], received))
            answer = _expect(actor, TrainBatch)
            assert answer is not None, "the hub ended the run"
            received, total = received + len(answer.groups), answer.total
        actor.send("hub", StepTrained(step[0]))
        step[0] += 1
    actor.send("hub", TrainingDone(_STEPS, {}))
    rollout.send("rollout-0", Stop("finished"))
    playing.join()


def _generate(mailbox: Mailbox, step: list[int]) -> None:
    request = 0
    while step[0] < _STEPS:
        request += 1
        mailbox.send("hub", LeaseRequest(request, step[0], _PROMPTS))
        grant = _expect(mailbox, LeaseGrant)
        if grant is None:
            return
        for lease in grant.leases:
            for sample in lease.samples:
                row = lease.group.row(sample)
                mailbox.send("hub", RowDone(row, lease.attempt, grant.version, ["relay-0"], 8192, float(sample)))


def _expect(mailbox: Mailbox, kind: type[M]) -> M | None:
    """The next letter of a kind; None at the end of the run."""
    with waiting("hub", kind.__name__, _PATIENCE_S) as wait:
        while True:
            letter = mailbox.receive(1.0)
            wait.check()
            if letter is not None and isinstance(letter.message, Stop):
                return None
            if letter is not None and isinstance(letter.message, kind):
                return letter.message


def journal_replay(options: Options) -> list[Measurement]:
    """Seconds to recover a run of so many events."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        _write_journal(path, options.events)
        started = time.perf_counter()
        replay(path)
        folded_s = time.perf_counter() - started
    return [Measurement("journal-replay", "30 s", folded_s, "s", 30 / folded_s)]


def _write_journal(path: Path, num_events: int) -> None:
    """The journal of a run: groups leased, finished, handed out and trained step by step."""
    journal, state, count = Journal(path), HubState(), 0

    def decide(event: ev.Event) -> None:
        nonlocal count
        journal.append(event)
        apply(event, state)
        count += 1

    decide(ev.Opened(epoch=1, samples_per_prompt=_SAMPLES))
    while count < num_events:
        groups = [GroupId(0, state.cursor + i) for i in range(_PROMPTS)]
        for group in groups:
            samples = list(range(_SAMPLES))
            decide(ev.Leased(group=group, samples=samples, attempt=1, version=state.step, holder="rollout-0"))
        for group in groups:
            for sample in range(_SAMPLES):
                row, reward = group.row(sample), float(sample)
                decide(ev.RowReady(row=row, units=["relay-0"], version=state.step, num_tokens=8192, reward=reward))
            decide(ev.Handed(step=state.step, groups=[group]))
        decide(ev.Trained(step=state.step))
    journal.close()


def _serve_hub(folder: str, address: str) -> None:
    """The hub's process, until its run ends."""
    recipe = Recipe(
        run=RunSettings(dir=folder, steps=_STEPS),
        data=DataSettings(path=str(Path(folder, "data.jsonl"))),
        batch=BatchSettings(prompts_per_step=_PROMPTS, samples_per_prompt=_SAMPLES),
        queue=QueueSettings(capacity=4 * _PROMPTS),
    )
    fleet = Fleet.join(address, "hub", 0, _SECRET, {}, recipe.comm)
    run(fleet, recipe)
    fleet.leave()


WORKLOADS = {"hub-events": hub_events, "journal-replay": journal_replay}

if __name__ == "__main__":
    _serve_hub(*sys.argv[1:])
