"""Rows of `relay.bench` about the hub: events a second through its mailbox and journal, and how fast a journal is folded.

python -m headrace.launch.bench.hub FOLDER STORE_ADDRESS      (the hub's process)
"""

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from ...comm.fleet import Fleet
from ...comm.mailbox import Mailbox
from ...comm.messages import (
    ActorDone,
    GroupId,
    HandOut,
    LeaseGrant,
    LeaseRequest,
    Message,
    RowDone,
    StepTrained,
    Stop,
    TakeRows,
)
from ...comm.settings import CommSettings, EmulatedSettings, RunSettings
from ...comm.waits import waiting
from ...relay import events as ev
from ...relay.hub_loop import run
from ...relay.journal import Journal, replay
from ...relay.settings import BatchSettings, DataSettings, QueueSettings, RepackSettings
from ...relay.state import HubState, apply
from .harness import Row

M = TypeVar("M", bound=Message)

_SECRET = b"benchmark"
_PROMPTS, _SAMPLES, _STEPS = 64, 8, 60
_PATIENCE_S = 120.0


@dataclass(slots=True)
class _Loss:
    kl_coef: float = 0.0


@dataclass(slots=True)
class HubSections:
    """The sections of a recipe that the hub reads."""

    run: RunSettings
    data: DataSettings
    batch: BatchSettings = field(default_factory=lambda: BatchSettings(_PROMPTS, _SAMPLES))
    queue: QueueSettings = field(default_factory=lambda: QueueSettings(capacity=4 * _PROMPTS))
    repack: RepackSettings = field(default_factory=RepackSettings)
    comm: CommSettings = field(default_factory=CommSettings)
    emulated: EmulatedSettings = field(default_factory=EmulatedSettings)
    algorithm: _Loss = field(default_factory=_Loss)


def hub_events() -> list[Row]:
    """Events a second of the hub's own process, its journal on, while one process plays all rollouts and the trainer."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "headrace.comm.store", "--end-with-parent"]
        store = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert store.stdout is not None
        address = store.stdout.readline().split()[1]
        Path(folder, "data.jsonl").write_text('{"prompt": "p"}\n' * 1000)
        hub = subprocess.Popen([sys.executable, "-m", "headrace.launch.bench.hub", folder, address])
        fleet = Fleet.join(address, "actor", 0, _SECRET, {}, CommSettings())
        started = time.monotonic()
        _play(fleet.post.open("rollout-0"), fleet.post.open("actor-0"))
        assert hub.wait(_PATIENCE_S) == 0
        fleet.leave()
        journal = Path(folder) / "journal.jsonl"
        lines = [msgspec.json.decode(line) for line in journal.read_bytes().splitlines()]
        state = replay(journal)
    assert state.step == _STEPS and state.holds, f"{time.monotonic() - started:.0f} s, step {state.step}"
    # The first steps are those in which processes start and files are opened.
    measured = [line["t"] for line in lines if "t" in line][len(lines) // 5 : -1]
    rate = len(measured) / (measured[-1] - measured[0])
    return [Row("hub-events", "5,000 a second", rate, "1/s", rate / 5000)]


def _play(rollout: Mailbox, actor: Mailbox) -> None:
    """All rollouts in one thread, the trainer in this one."""
    step = [0]
    playing = threading.Thread(target=_generate, args=(rollout, step), name="rollouts")
    playing.start()
    while step[0] < _STEPS:
        received, total = 0, 1
        while received < total:
            actor.send("hub", TakeRows(step[0] * _PROMPTS + received, ["train"], step[0], received))
            answer = _expect(actor, HandOut)
            assert answer is not None, "the hub ended the run"
            received, total = received + len(answer.groups), answer.total
        actor.send("hub", StepTrained(step[0]))
        step[0] += 1
    actor.send("hub", ActorDone(_STEPS, {}))
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


def journal_replay(num_events: int) -> list[Row]:
    """Seconds to recover a run of so many events."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        _write_journal(path, num_events)
        started = time.perf_counter()
        replay(path)
        folded_s = time.perf_counter() - started
    return [Row("journal-replay", "30 s", folded_s, "s", 30 / folded_s)]


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
                row = group.row(sample)
                decide(
                    ev.RowReady(row=row, units=["relay-0"], version=state.step, num_tokens=8192, reward=float(sample))
                )
            decide(ev.Handed(step=state.step, groups=[group]))
        decide(ev.Trained(step=state.step))
    journal.close()


def main(folder: str, address: str) -> None:
    """The hub's process, until its run ends."""
    sections = HubSections(RunSettings(dir=folder, steps=_STEPS), DataSettings(path=str(Path(folder, "data.jsonl"))))
    fleet = Fleet.join(address, "hub", 0, _SECRET, {}, sections.comm)
    run(fleet, sections)
    fleet.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
